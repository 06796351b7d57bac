"""From two descriptions to one plan, and from a plan to each rank's program. Pure."""

from .check import check_plan
from .compile import compile_program
from .plan import PLANNER_VERSION, Link, Plan, PlanError, PlanOptions, Route, Slab, Transfer, TransferGroup
from .planner import plan_refit
from .program import BucketProgram, Message, PieceTable, Program
from .transfers import TransferTable

__all__ = [
    "PLANNER_VERSION",
    "BucketProgram",
    "Link",
    "Message",
    "PieceTable",
    "Plan",
    "PlanError",
    "PlanOptions",
    "Program",
    "Route",
    "Slab",
    "Transfer",
    "TransferGroup",
    "TransferTable",
    "check_plan",
    "compile_program",
    "plan_refit",
]
