"""Made-up answers of processes that plan."""

from dataclasses import replace

from snugfit._core.budget import Budget
from snugfit._core.hardware import Hardware
from snugfit._core.option_groups import BudgetOptions, MachineOptions, ModelOptions
from snugfit._core.plan import Candidate, Cost, Plan
from snugfit._core.request import Request, StrategyOptions
from snugfit._core.workload import Workload

REQUEST = Request(
    model=ModelOptions("m"), budget=BudgetOptions("50MB"), machine=MachineOptions(profile_cache="off"),
)  # fmt: skip
MB = 10**6


def alone(name, **settings):
    return replace(REQUEST, strategy=StrategyOptions(name, **settings))


def plan_of(*candidates, chosen=None):
    workload = Workload("m", "d", (3, 4, 4), 2, 10, 5, 5)
    hardware = Hardware("cpu", "cpu", 1, 10**10, "Linux", "2", True)
    return Plan(workload, Budget("50MB"), hardware, candidates, chosen).to_json()


def refusal(retries=(), **guesses):
    candidates = [Candidate(name, False, reasons=("no",), smallest_bytes=guess) for name, guess in guesses.items()]
    error = {"code": 3, "type": "InfeasibleBudgetError", "message": "as guessed"}
    return {
        "plan": plan_of(*candidates), "infeasible": error, "retries": [each.to_json() for each in retries],
        "comparison": [],
    }  # fmt: skip


def fitting(name, smallest=None, seconds=1.0):
    candidate = Candidate(name, True, predicted=Cost(40 * MB, seconds, seconds))
    return {
        "plan": plan_of(candidate, chosen=0), "infeasible": None, "comparison": [name], "smallest": smallest,
    }  # fmt: skip


class Machine:
    """Fresh processes: each strategy fits from its own budget on, and nothing that was asked before matters."""

    def __init__(self, **needs):
        self.needs, self.asked, self.planned = needs, [], []

    def __call__(self, request, smallest=False):
        return self.plan(request) if smallest else self.ask(request)

    def ask(self, request):
        self.asked.append((request.strategy.strategy, request.strategy.local_loss))
        return self._answer(request)

    def plan(self, request):
        self.planned.append((request.strategy.strategy, int(request.budget.memory.removesuffix("MB"))))
        return self._answer(request)

    def _answer(self, request):
        name, budget = request.strategy.strategy, int(request.budget.memory.removesuffix("MB"))
        need = self.needs[f"{name}_{request.strategy.local_loss}".removesuffix("_auto").replace("-", "_")]
        return fitting(name, need * MB) if budget >= need else refusal(**{name: int(need * 1.2) * MB})
