"""Every cell is checked before the first one runs: refusals, duplicates, schemes that are not what they are called."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from evalq.config import RunConfig, measured_part
from evalq.errors import ConfigError, InfeasibleError
from evalq.plan.feasibility import require_feasible
from evalq.preparation import Prepared, as_baseline, baseline_scheme, effective_scheme, prepare
from evalq.sweep.results import CellResult


@dataclass
class Checked:
    """The cells that will run, a result for each that was asked for, and what was left out as measured already."""

    cells: list[Prepared] = field(default_factory=list)
    results: list[CellResult] = field(default_factory=list)  # in the order asked for
    of_cell: dict[int, CellResult] = field(default_factory=dict)  # by id of the prepared config
    names: dict[str, str] = field(default_factory=dict)  # key -> a name that no other cell has
    duplicates: list[str] = field(default_factory=list)


def check_cells(configs: Sequence[RunConfig], elsewhere: bool = False) -> Checked:
    """Prepare all cells; refused ones are results at once, and duplicates by effective config are left out.

    Errors: ConfigError that lists every problem of every cell.
    """
    checked, problems = Checked(), list[str]()
    seen: dict[str, CellResult] = {}
    for config in configs:
        result = CellResult(f"{config.model.name} {config.quant.name}", config)
        try:
            cell = prepare(config, elsewhere)
        except ConfigError as error:
            problems.extend(error.problems)
            continue
        except InfeasibleError as error:
            result.error = error
            checked.results.append(result)
            continue
        result.config, result.is_baseline = cell.config, cell.is_baseline
        result.error = _without_yardstick(cell)
        if result.error is not None:
            checked.results.append(result)
            continue
        problems.extend(_misnamed(cell))
        key = cell_key(cell)
        if key in seen:
            problems.extend(_unlike_gates(seen[key], result))
            checked.duplicates.append(
                f"{result.name} is the same as {seen[key].name}: both have one effective config, which is measured once"
            )
            continue
        seen[key] = result
        checked.names[key] = _name_of(result, key, checked)
        checked.results.append(result)
        checked.of_cell[id(cell.config)] = result
        checked.cells.append(cell)
    if problems:
        raise ConfigError(*dict.fromkeys(problems))
    return checked


def _without_yardstick(cell: Prepared) -> InfeasibleError | None:
    """A scheme may fit where the unquantised model does not; then there is nothing to compare it with."""
    if cell.is_baseline:
        return None
    try:
        require_feasible(as_baseline(cell).config)
    except InfeasibleError as error:
        return InfeasibleError(f"its baseline cannot run: {error}")
    return None


def _name_of(result: CellResult, key: str, checked: Checked) -> str:
    """The cell's name; with its engine or its key where another cell has that name already."""
    taken = set(checked.names.values())
    for name in (result.name, f"{result.name} {result.config.engine.name}", f"{result.name} {key[:6]}"):
        if name not in taken:
            return name
    return f"{result.name} {key}"


def _misnamed(cell: Prepared) -> list[str]:
    quant = cell.config.quant
    if quant.name == "baseline" and not cell.is_baseline:
        own = baseline_scheme(cell.config).kv_cache_dtype
        return [
            f"scheme baseline is not the unquantised model (KV cache {quant.kv_cache_dtype}, the model's own is {own}); "
            f"choose +quant=baseline with quant.kv_cache_dtype={own}, or give it another quant.name"
        ]
    if cell.is_baseline and quant.name != "baseline":
        return [
            f"scheme {quant.name} changes nothing: its effective config is the baseline's; "
            "give it groups, an engine quantization or another KV dtype"
        ]
    return []


def _unlike_gates(first: CellResult, second: CellResult) -> list[str]:
    """One measurement cannot be judged by two policies in one sweep: it has one verdict."""
    if first.config.gate == second.config.gate:
        return []
    return [
        f"{second.name} is asked for with two gate policies; a cell has one verdict, so leave one out and judge the record "
        "by the other with evalq gate"
    ]


def effective_cell(cell: Prepared) -> str:
    """What the cell measures, without names of schemes."""
    data = measured_part(cell.config)
    data.pop("quant")
    looks = [cell.config.gate.extend, list(cell.config.gate.looks)]  # they decide how many documents are measured
    return json.dumps([data, looks, effective_scheme(cell.config.quant)], sort_keys=True)


def cell_key(cell: Prepared) -> str:
    """Short name of an effective cell, equal for equal ones."""
    return hashlib.sha256(effective_cell(cell).encode()).hexdigest()[:24]


def baseline_key(cell: Prepared) -> str:
    """Key of the baseline that the cell is compared with; cells of one group share it."""
    return cell_key(as_baseline(cell))
