"""The sweep over transformers' language models: equal to one process, or refused for a known reason.

Slow. Written for the version of transformers in ``SEEN``; another one has other classes, and the lists
have to follow: a class that is in no list must equal one process.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks import projection_order
from lightning_cp.errors import ConfigError
from tests.helpers.models.steps import Outcome
from tests.helpers.pool import expect_on_every_rank, run_ranks
from tests.nightly.models import sweep

SEEN = "5.23"

REFUSED = {
    "mix tokens along the sequence outside of attention": """
    AXK2ForCausalLM BailingHybridForCausalLM DeepseekV32ForCausalLM DeepseekV4ForCausalLM
    FalconH1ForCausalLM FalconMambaForCausalLM GlmMoeDsaForCausalLM HYV4ForCausalLM
    InklingForCausalLM JambaForCausalLM KimiLinearForCausalLM Lfm3ForCausalLM
    MambaForCausalLM MiniMaxForCausalLM NemotronHForCausalLM OlmoHybridForCausalLM
    Qwen3NextForCausalLM Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM Qwen4ExpForCausalLM
    RecurrentGemmaForCausalLM xLSTMForCausalLM
    """,
    "takes no position_ids, and neither does any model inside": """
    BartForCausalLM BigBirdPegasusForCausalLM BlenderbotForCausalLM
    BlenderbotSmallForCausalLM MBartForCausalLM MarianForCausalLM PLBartForCausalLM
    PegasusForCausalLM
    """,
    "does not count positions from 0 on": """
    CamembertForCausalLM CamembertForMaskedLM Data2VecTextForCausalLM Data2VecTextForMaskedLM
    EsmForMaskedLM RobertaForCausalLM RobertaForMaskedLM RobertaPreLayerNormForCausalLM
    RobertaPreLayerNormForMaskedLM XLMRobertaForCausalLM XLMRobertaForMaskedLM
    XLMRobertaXLForCausalLM XLMRobertaXLForMaskedLM
    """,
    "computes its loss by itself": "WhisperForCausalLM",
    "no attention call was intercepted": "FNetForMaskedLM",
    "changes its attention mask after making it": "DogeForCausalLM",
    r"MobileBertEmbeddings, which joins neighbouring tokens": "MobileBertForMaskedLM",
    "dense attention mask of shape": "LayoutLMForMaskedLM",
}
"""What is said, and of which classes."""

NOT_MADE = """
    BambaForCausalLM BltForCausalLM BridgeTowerForMaskedLM CohereCompassForCausalLM
    CsmDepthDecoderForCausalLM DbrxForCausalLM Dots1ForCausalLM EsmcForMaskedLM
    FuyuForCausalLM Gemma3nForCausalLM Gemma4AssistantForCausalLM Gemma4ForCausalLM
    Gemma4UnifiedAssistantForCausalLM Gemma4UnifiedForCausalLM GitForCausalLM
    GraniteMoeHybridForCausalLM Inkling2ForCausalLM Lfm2MoeForCausalLM Mamba2ForCausalLM
    ModernVBertForMaskedLM MusicgenForCausalLM MusicgenMelodyForCausalLM NeoMMEForMaskedLM
    Phi4MultimodalForCausalLM RoCBertForCausalLM RoCBertForMaskedLM UltraVBertForMaskedLM
    XmodForCausalLM XmodForMaskedLM Zamba2ForCausalLM ZambaForCausalLM ZayaForCausalLM
"""
"""Classes that ``sweep.SIZES`` do not make tiny."""

REASONS = {name: reason for reason, listed in REFUSED.items() for name in listed.split()}


def names() -> list[str]:
    """The classes that should equal one process, or be refused."""
    return [name for name in sweep.names() if name not in NOT_MADE.split()]


def worst(got: Outcome, want: Outcome) -> float:
    """The largest difference of loss, logits and gradients, as a part of their largest entries."""
    parts = [(torch.tensor(got.loss), torch.tensor(want.loss)), (got.logits, want.logits)]
    assert got.gradients.keys() == want.gradients.keys()
    parts += [(got.gradients[name], gradient) for name, gradient in want.gradients.items()]
    errors = [
        float((ours - theirs).abs().max()) / max(float(theirs.abs().max()), 1e-3)
        for ours, theirs in parts
        if theirs.numel()
    ]
    return float(torch.tensor(errors).max())  # NaN if any is


def test_every_listed_class_exists() -> None:
    transformers = pytest.importorskip("transformers")
    if not transformers.__version__.startswith(SEEN):
        pytest.skip(f"the lists are of transformers {SEEN}, this is {transformers.__version__}")
    assert {*REASONS, *NOT_MADE.split()} <= set(sweep.names())
    assert len(names()) - len(REASONS) > 80


@pytest.mark.filterwarnings("ignore")  # of defaults that tiny sizes do not fit
def test_every_class_equals_one_process_or_is_refused() -> None:
    """In one case: finding the classes imports every model, which collecting tests must not."""
    wrong: dict[str, str] = {}
    for name in names():
        try:
            refused(name) if name in REASONS else equal(name)
        except Exception as error:  # reported below, by name
            wrong[name] = f"{type(error).__name__}: {error}"[:2000]
    assert not wrong, "\n\n".join(f"{name}: {why}" for name, why in wrong.items())


def refused(name: str) -> None:
    match = REASONS[name]
    expect_on_every_rank(2, sweep.some_ranks, name, error=ConfigError, match=match, timeout=30)


def equal(name: str) -> None:
    error = worst_of_ranks(name, 2, 1)
    if not error <= 1e-5:
        raise ValueError(f"differs from one process by {error}")


def worst_of_ranks(name: str, ring: int, ulysses: int) -> float:
    want = sweep.one_process(name)
    ranks = run_ranks(ring * ulysses, sweep.some_ranks, name, ring, ulysses, timeout=60)
    return float(torch.tensor([worst(got, want) for got in ranks]).max())  # NaN if any is


WIDTHS = """
    DeepseekV2ForCausalLM DeepseekV3ForCausalLM AXK1ForCausalLM Dots3NoteForCausalLM
    Glm4MoeLiteForCausalLM LongcatFlashForCausalLM MiMoV2FlashForCausalLM MiniCPM3ForCausalLM
    Mistral4ForCausalLM YoutuForCausalLM
"""
"""Classes whose values have another width than their keys: the table of docs/guides/models.md."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WIDTHS.split())
@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (3, 1), (4, 1), (2, 2), (1, 4)])
def test_values_of_another_width(name: str, ring: int, ulysses: int) -> None:
    """Norms, routers and softmax of these models are float32; with ``-s`` the error is printed."""
    error = worst_of_ranks(name, ring, ulysses)
    print(f"{name}, ring {ring} by Ulysses {ulysses}: {error:.1e}")
    assert error <= 1e-6


class KeysFirst(torch.nn.Module):
    """Projects keys, then queries, then values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(4, 4) for _ in range(3))
        self.order = projection_order.ProjectionOrder(self)

    def forward(self, x: torch.Tensor) -> None:
        keys, queries = self.k(x), self.q(x)
        self.order.attend(self, *(part[:, None] for part in (queries, keys.cos(), self.v(x))))


def test_the_order_of_projections_is_found() -> None:
    module = KeysFirst()
    module(torch.ones(1, 3, 4))
    assert module.order.found == {projection_order.OTHERS_FIRST}
    assert projection_order.order_of("LlamaForCausalLM") == {projection_order.QUERIES_FIRST}
    assert projection_order.order_of("GPT2LMHeadModel") == {projection_order.TOGETHER}
