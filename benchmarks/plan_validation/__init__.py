"""The planner's predictions beside what is measured."""
