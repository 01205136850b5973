"""A hundred mistakes of one line each turn a small check red:
what the project rests on can fail.
"""

from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import test_chip
import test_cost
import test_movement
import test_releases
import torch
from simulator_harness import attempt, ones, product, psum
from torch.nn.functional import cross_entropy

from delta_trn.backends import gated_delta_rule
from delta_trn.backends.dispatch import BACKENDS
from delta_trn.backends.gated_delta_rule import triton_adapter, triton_time_adapter
from delta_trn.backends.gated_delta_rule.contract import make_gates
from delta_trn.backends.gated_delta_rule.once import once
from delta_trn.backends.parity import layer_cases, mixer_cases, rule
from delta_trn.backends.parity.judge import FACTOR, error
from delta_trn.backends.parity.layer_cases import LayerCase
from delta_trn.backends.parity.rule_cases import BOTH, BY_NAME, STEPS, Case, inputs
from delta_trn.models.gated_deltanet import GatedDeltaNet
from delta_trn.models.layers import project
from delta_trn.models.mup import Role
from delta_trn.models.parameters import scaled_parameters
from delta_trn.nki_kernels import cross_entropy as nki_readout
from delta_trn.train.checkpoints.contents import random_states, set_random_states
from delta_trn.train.data.loader import Loader
from delta_trn.train.run.optimizer import learning_rate, set_learning_rate
from delta_trn.train.settings.errors import PositionMismatch
from delta_trn.triton_kernels import gated_delta_rule_refine as refine
from delta_trn.triton_kernels import rms_norm, short_convolution
from delta_trn.triton_kernels.launch import adjust
from nki_simulator import StrictError, nisa, nl
from tests.backends import test_gates
from tests.backends.cpu_kernel import test_chunked_kernel, test_states
from tests.backends.operator import test_stand_ins
from tests.backends.test_gated_delta_rule import TestFlashLinearAttention as Arguments
from tests.models import (
    test_ddl,
    test_ddl_options,
    test_dynamic_lengths,
    test_initial_values,
    test_language_model,
    test_lazy_product,
    test_loss,
    test_replaced_layers,
)
from tests.models.ecosystem import (
    test_fully_sharded,
    test_packing,
    test_weights,
    test_widths,
)
from tests.models.ecosystem.handling import test_files, test_handed_on, test_told
from tests.nki_kernels import test_gated_delta_layer
from tests.support import families, tiny_models
from tests.support.planted_bugs import BUGS, RULE, planted
from tests.train import test_optimizers
from tests.train.parallel import test_same_run

WHOLE = Case(
    "planted", 1, 70, 2, 16, 16, "two chunks, groups, a state", HV=4, decay="weak", reflect=True,
    norm="random", state=True, loss=BOTH,
)  # fmt: skip
# sequences whose order by length is no exchange of two, some of them empty
PACKED = replace(WHOLE, name="packed", T=111, lengths=(0, 5, 0, 70, 33, 3))
SEGMENTS = replace(WHOLE, name="segments", T=40, H=1, HV=1, K=72, V=24)
TILES = replace(WHOLE, name="tiles", T=20, H=1, HV=2, K=80, V=40)
FLOAT16 = replace(WHOLE, name="float16", T=20, scale=1e-4)
EQUATIONS = test_language_model.TestLayer().test_forward_computes_the_equations_of_its_docstring
PACKING = test_language_model.TestInfluenceOfTokens().test_packed_sequences_have_the_logits_of_separate_ones
# three chunks, badly conditioned: with one of 64 tokens a wrong sign passed
ALIKE = Case("alike", 1, 130, 4, 16, 64, "", keys="equal", beta=2.0, decay="none")
HEADS = replace(STEPS["decode_gva_2"], name="heads", B=11, T=2, K=144)
COLUMNS = replace(HEADS, name="columns", B=2, H=1, HV=1, K=16, V=40)
TWO_BLOCKS = LayerCase("two", "delta_residual", (2, 2048, 5), "in backward, two equal blocks of D")
WIDE_ROWS = LayerCase(
    "wide", "gated_rms_norm", (131, 2100), "tiles of NKI that are not on their way together"
)
WORDS = LayerCase("words", "linear_cross_entropy", (3, 16, 600), "two blocks of words")
VOCABULARY = LayerCase(
    "vocabulary", "linear_cross_entropy", (3, 16, 5003), "two tiles of words", size=3.0
)


def judged(backend, case, dtype=torch.float32):
    """Returns whether a backend passes, beside a baseline that agrees with the judge."""
    verdicts = rule.verdicts(case, dtype, backend)
    most = 0.1 if dtype in (torch.bfloat16, torch.float16) else 1e-4
    return all(verdict.passed and verdict.baseline < most for verdict in verdicts)


def judged_with(module, name, value, check):
    """Returns whether a check passes while a constant of a module has another value."""
    with patch.object(module, name, value):
        return check()


def decoding_passes(backend, case):
    return all(verdict.passed for verdict in rule.step_verdicts(case, torch.float32, backend))


def packed_passes():
    """Sequences without states are one call of NKI's kernels;
    no state may pass from one to the next.
    """
    x = inputs(replace(PACKED, state=False), torch.float32)
    options = {"cu_seqlens": x.cu_seqlens, "use_qk_l2norm_in_kernel": True}
    ours, theirs = (
        gated_delta_rule(x.q, x.k, x.v, x.g, x.beta, **options, backend=name)[0]
        for name in ("nki-simulator", "chunked")
    )
    return torch.allclose(ours, theirs, rtol=1e-3, atol=1e-4)


def float16_states_pass():
    """Returns whether states and their gradients out of float16's range are
    as exact as those within.
    """
    case = replace(WHOLE, T=20, H=1, HV=1, scale=2.0**-8, loss=("final_state",))
    x = inputs(case, torch.float16)

    def errors(state, gradient):
        v = (state / 256 * x.v.float()).half()
        y = replace(x, initial_state=state * x.initial_state, v=v, dstate=gradient * x.dstate)
        results, exact = rule.outcome(y, "triton"), rule.outcome(y.double(), "recurrent")
        names = [
            name for name in results if name != "dq" and (gradient > 1e-6 or name in ("dg", "dh0"))
        ]
        return {name: error(results[name], exact[name]) for name in names}

    usual, found = (
        errors(1.0, 2.0**-8),
        [errors(2.0**20, 2.0**-8), errors(1.0, 2.0**12), errors(1.0, 2.0**-25)],
    )
    return all(value <= FACTOR * usual[name] for x in found for name, value in x.items())


def refined_in_parts():
    """Returns whether heads that are refined one by one, 16 columns at a time,
    are what they are at once.
    """
    x = inputs(replace(ALIKE, T=40, H=2, V=32), torch.bfloat16)
    whole = rule.outcome(x, "triton")["dg"]
    narrow = lambda row: replace(row, refine=replace(row.refine, columns=16))  # noqa: E731
    with patch.object(refine, "HEADS", 1), adjust(narrow):
        parts = rule.outcome(x, "triton")["dg"]
    return (parts - whole).norm() < 0.01 * whole.norm()


def products_are_checked():
    """Returns whether the simulator refuses a moving tile of twos,
    and to add to a partly copied tile.
    """

    def moving_twos():
        twos = ones(4, 4)
        nisa.tensor_scalar(dst=twos, data=twos, op0=nl.multiply, operand0=2.0)
        nisa.nc_matmul(dst=psum(4, 4), stationary=ones(4, 4), moving=twos, is_moving_onezero=True)

    def partly_copied():
        tile = product(4, 8)
        nisa.tensor_copy(dst=tile[:, 0:4], src=ones(4, 4))
        nisa.nc_matmul(dst=tile, stationary=ones(4, 4), moving=ones(4, 8))

    refused = 0
    for body in (moving_twos, partly_copied):
        try:
            attempt(body)
        except StrictError:
            refused += 1
    return refused == 2


def releases_differ():
    """Returns whether the simulator knows places that a release names,
    repeats and blocks of rows.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("DELTA_TRN_NKI", "0.7.0")
        test_releases.test_positional_operands_have_the_order_of_the_release(patched)
    test_releases.test_a_place_that_repeats_is_written_alone()
    test_movement.test_a_matrix_of_any_number_of_rows_is_loaded_transposed(300)
    return True


def chip_is_followed():
    """Returns whether the simulator refuses on Trn1 what fails there, and takes what works."""
    for body in test_chip.BROKEN:
        with pytest.MonkeyPatch.context() as patched:
            test_chip.test_trn1_refuses_it_unless_the_rule_is_switched_off(body, patched)
    for body in test_chip.ALLOWED:
        test_chip.test_what_works_on_trn1_is_allowed(body)
    return True


def numbers_are_the_chips():
    """Returns whether sums are sequential, and functions err as measured where that is asked for."""
    test_chip.test_sums_add_one_element_after_the_other_in_float32("tensor_reduce")
    with pytest.MonkeyPatch.context() as patched:
        test_chip.test_functions_have_the_measured_errors_where_that_is_asked_for(patched)
    return True


def costs_are_the_measured():
    """Returns whether waits, whole tensors, PSUM and few rows are priced."""
    test_cost.test_an_instruction_is_busy_longer_where_it_waits_for_another_engine()
    test_cost.test_engines_wait_for_whole_tensors()
    test_cost.test_a_second_input_costs_nothing_where_one_is_in_psum("tensor_tensor")
    test_cost.test_fewer_rows_or_stationary_columns_are_never_cheaper()
    return True


def values_come_first():
    x = inputs(replace(WHOLE, state=False, T=3, V=24), torch.float32)
    options = {"output_final_state": True, "state_v_first": True, "backend": "chunked"}
    state = gated_delta_rule(x.q, x.k, x.v, x.g, x.beta, **options)[1]
    return state is not None and state.shape == (1, 4, 24, 16)


def carry_passes():
    """The state's gradient is nearly orthogonal to the state,
    so that what rounding takes from it counts.
    """
    case = Case(
        "carried",
        2,
        1,
        1,
        16,
        80,
        "nothing but a state",
        beta=0.0,
        state=True,
        loss=("final_state",),
    )
    x = inputs(case, torch.bfloat16)
    S, dS = x.initial_state, x.dstate
    along = (dS * S).sum((-1, -2), keepdim=True) / S.square().sum((-1, -2), keepdim=True)
    x = replace(x, dstate=dS - 0.98 * along * S)
    results = rule.outcome(x, "triton")
    return all(verdict.passed for verdict in rule.reference_for(x).verdicts("triton", results))


def layer_passes(case, backend="chunked"):
    case = layer_cases.BY_NAME[case] if isinstance(case, str) else case
    return all(verdict.passed for verdict in layer_cases.verdicts(case, torch.float32, backend))


def mixer_passes(*names, dtype=torch.float32):
    cases = [mixer_cases.BY_NAME[name] for name in names or ("mixer_short", "mixer_groups")]
    return all(
        verdict.passed
        for case in cases
        for verdict in mixer_cases.verdicts(case, dtype, "nki-simulator")
    )


def widths_pass():
    """At twice the base width: half the logits;
    in hidden matrices 2^-1/2 of the std and half the rate.
    """
    model, x = tiny_models.model(), tiny_models.tokens(2, 9)
    with torch.no_grad():
        logits, hidden = model(x).logits, model.model(x).last_hidden_state
        if not torch.allclose(logits, 0.5 * hidden @ model.model.embed.weight.T):
            return False
    options = {
        "optimizer": "adamw",
        "lr": 1.0,
        "weight_decay": 0.1,
        "independent_weight_decay": True,
    }
    table = scaled_parameters(model, **options, rates={Role.EMBEDDING: 4.0})
    if any(row.lr != 4 for row in table if row.role is Role.EMBEDDING):
        return False
    hidden = [row for row in table if row.role is Role.HIDDEN]
    plain = model.config.initializer_range * 2**-0.5
    return all(row.lr == 0.5 and row.weight_decay == 0.2 for row in hidden) and any(
        row.init_std == pytest.approx(plain) for row in hidden
    )


def loss_passes():
    model, x = tiny_models.model(), tiny_models.tokens(2, 9)
    with torch.no_grad():
        outputs = model(x, labels=x)
    expected = cross_entropy(outputs.logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())
    return torch.allclose(outputs.loss, expected, rtol=1e-9)


def gate_bits_pass():
    """A token's gates are what they are alone, however many there are."""
    a, A_log = torch.randn(12000, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(3)
    together = make_gates(a, a, A_log, None, 1.0)
    parts = [make_gates(x, x, A_log, None, 1.0) for x in (*a[:40].split(1), a[40:4096], a[4096:])]
    return all(
        torch.equal(torch.cat(x), y)
        for x, y in zip(zip(*parts, strict=True), together, strict=True)
    )


def states_pass():
    tensors = test_states.draw(test_states.PACKED)[:6]
    _, ours = test_states.operation(*tensors, bounds=test_states.PACKED, at=test_states.AT)
    _, theirs = test_states.loop(*tensors, bounds=test_states.PACKED, at=test_states.AT)
    return torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def rows_pass():
    """How a sequence is projected does not depend on its batch:
    one product ends in other bits than three.
    """
    maps, counts = [torch.nn.Linear(64, n, bias=False) for n in (48, 48, 96)], []
    for x in (torch.zeros(B, T, 64) for T in (1, 37, 200) for B in (1, 3)):
        with patch.object(
            torch.nn.functional, "linear", wraps=torch.nn.functional.linear
        ) as products:
            project(x, maps)
        counts.append(products.call_count)
    return counts == [3, 3, 3, 3, 1, 1]


def padding_passes():
    """Padding neither decays a state nor writes to it, whatever stands there."""
    mixer = next(
        module for module in tiny_models.model().modules() if isinstance(module, GatedDeltaNet)
    )
    real = torch.tensor([[[False], [True]]])
    x = torch.randn(1, 2, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        gates = mixer.gates(x, SimpleNamespace(real=real, begins=None))
    return all(y[0, 0].abs().max() < 1e-20 < y[0, 1].abs().min() for y in gates)


def rates_pass():
    optimizer = SimpleNamespace(param_groups=[{"factor": 0.5}, {"factor": 1.0}])
    set_learning_rate(optimizer, 0.1)
    schedule = SimpleNamespace(warmup=10, min_lr=0.0, decay_steps=None)
    config = SimpleNamespace(optimizer=SimpleNamespace(lr=1.0), schedule=schedule, steps=100)
    rates = [learning_rate(config, i) for i in (0, 5, 10, 100)]
    return [group["lr"] for group in optimizer.param_groups] == [0.05, 0.1] and rates == [
        0.0,
        0.5,
        1.0,
        0.0,
    ]


class Counting(Loader):
    """Yields windows that say which sample they are."""

    kind = "stream"

    def __init__(self, rank):
        self.dataset, self.split = SimpleNamespace(fingerprint="x"), "train"
        self._bos, self.batch, self.sequence, self.seed = None, 2, 3, 7
        self.rank, self.world, self._samples = rank, 2, 0

    def _windows(self, first):
        return np.repeat(np.arange(first, first + self.batch)[:, None], self.sequence + 1, axis=1)


def data_passes():
    """Two ranks take every sample once, with masks of their own, and go on where they were."""
    ranks = [Counting(rank) for rank in (0, 1)]
    noise = [loader.noise() for loader in ranks]
    first = [sample for loader in ranks for sample in loader.next_batch()[0][:, 0].tolist()]
    resumed = [Counting(rank) for rank in (0, 1)]
    for loader in resumed:
        loader.load_state_dict(ranks[0].state_dict())
    second = [sample for loader in resumed for sample in loader.next_batch()[0][:, 0].tolist()]
    return first + second == list(range(8)) and not torch.equal(*noise)


def generator_passes():
    with torch.random.fork_rng():
        states = random_states(torch.device("cpu"))
        expected = torch.nn.functional.dropout(torch.ones(64))
        set_random_states(states, torch.device("cpu"))
        return torch.equal(torch.nn.functional.dropout(torch.ones(64)), expected)


def holds(test, *arguments):
    """Runs a test that stands elsewhere; its assertions decide."""
    test(*arguments)
    return True


def with_patches(test):
    with pytest.MonkeyPatch.context() as patched:
        return holds(test, patched)


PICKLED, CASTS = test_handed_on.TestPickle(), test_handed_on.TestCasts()
HANDED_ON = {
    "pickle": PICKLED.test_what_was_pickled_or_copied_is_patched,
    "process": PICKLED.test_so_is_a_model_of_a_process_that_is_patched,
    "offload": test_handed_on.TestOffload().test_a_patched_model_runs_whichever_came_first,
    "others": test_handed_on.TestClass().test_a_forward_that_others_put_into_a_module_is_not_passed_by,
    "cast": CASTS.test_a_cast_after_the_patch_leaves_the_numbers_of_heads,
    "process's casts": CASTS.test_models_that_are_made_or_cast_in_a_patched_process_keep_them,
    "no elements": CASTS.test_weights_of_no_elements_are_not_in_memory,
}
REPLACED = test_replaced_layers.test_layers_in_the_maps_places_compute_what_they_compute_alone
WATCHED = test_replaced_layers.test_hooks_of_every_kind_are_called_once
PACKED_GATES = (
    test_replaced_layers.test_inputs_of_the_gates_are_not_rounded_to_what_a_quantizer_stores
)
READOUT = test_replaced_layers.test_a_loss_calls_what_stands_in_the_readouts_place


def whole_layers_pass(name):
    test = (
        test_replaced_layers.test_a_kernel_of_a_whole_layer_passes_by_no_part_that_others_replaced
    )
    with pytest.MonkeyPatch.context() as patched:
        return holds(test, name, test_replaced_layers.hook, patched)


def separate_numbers_pass():
    with TemporaryDirectory() as folder:
        test = (
            test_fully_sharded.test_separate_numbers_keep_their_names_in_files_and_change_no_result
        )
        return holds(test, "ours", Path(folder))


def flash_attention_passes():
    with pytest.MonkeyPatch.context() as patched:
        test_packing.replace_flash_attention(patched)
        test = (
            test_packing.test_compiled_flash_attention_keeps_a_packed_row_apart_and_refuses_several
        )
        return holds(test, None, 2)


def recorded_bounds_pass():
    """Keeps what follows from bounds on a CPU, too, as on an accelerator."""
    with patch.dict(once.__globals__, {"_keeps": lambda x: True}):
        return holds(*test_stand_ins.CHECKS["recorded bounds"])


def in_a_folder(test, *arguments):
    with TemporaryDirectory() as folder:
        return holds(test, *arguments, Path(folder))


def bounds_of_a_graph_pass():
    with pytest.MonkeyPatch.context() as patched:
        test = test_told.TestBounds().test_a_graph_that_is_captured_asserts_them_without_waiting
        return holds(test, patched)


CHECKS = {
    "chunked": lambda: judged("chunked", WHOLE),
    "gates": lambda: judged("chunked", replace(WHOLE, gates="plain")),
    "gates in float64": lambda: judged("chunked", BY_NAME["gates_wide"], torch.float64),
    "chunked, carry": lambda: judged("chunked", BY_NAME["carry"]),
    "chunked, equal keys": lambda: judged("chunked", BY_NAME["collide"]),
    "chunked, strong decay": lambda: judged("chunked", BY_NAME["forget"]),
    "chunked, wide gates": lambda: judged("chunked", BY_NAME["gates_wide"]),
    "chunked, packed": lambda: judged("chunked", PACKED),
    "chunked, float64": lambda: judged("chunked", WHOLE, torch.float64),
    "chunked's decoding": lambda: decoding_passes("chunked", HEADS),
    "triton": lambda: judged("triton", WHOLE),
    "triton's segments": lambda: judged_with(
        triton_time_adapter, "SEGMENT", 1, lambda: judged("triton", SEGMENTS)
    ),
    "triton's wide heads": lambda: judged("triton", TILES),
    "triton, equal keys": lambda: all(
        verdict.passed for verdict in rule.verdicts(ALIKE, torch.bfloat16, "triton")
    ),
    "triton's refined heads": refined_in_parts,
    "triton, float16's states": float16_states_pass,
    "triton's pairs": lambda: judged("triton", replace(WHOLE, T=20, H=1, HV=2), torch.bfloat16),
    "triton's states, not kept": lambda: judged_with(
        triton_adapter, "KEPT_BYTES", 0, lambda: judged("triton", replace(WHOLE, T=20, H=1, HV=1))
    ),
    "triton, float16": lambda: judged("triton", FLOAT16, torch.float16),
    "triton's vocabulary": lambda: layer_passes(VOCABULARY, "triton"),
    "triton's many rows": lambda: judged_with(
        rms_norm, "PROGRAMS", 2, lambda: layer_passes("norm_head", "triton")
    ),
    "triton's sigmoid norm": lambda: layer_passes("sigmoid_norm_head", "triton"),
    "triton's sum": lambda: layer_passes("sum_odd", "triton"),
    "triton's ignored words": lambda: layer_passes("loss_ignored", "triton"),
    "triton's residual": lambda: layer_passes("residual_blocks", "triton"),
    "triton's decoding": lambda: all(decoding_passes("triton", case) for case in (HEADS, COLUMNS)),
    "triton's carry": carry_passes,
    "triton's convolution": lambda: layer_passes("conv_packed", "triton"),
    "triton's spans": lambda: judged_with(
        short_convolution, "PROGRAMS", 2, lambda: layer_passes("conv_ragged", "triton")
    ),
    "nki": lambda: judged("nki-simulator", WHOLE),
    "nki, decoding": lambda: decoding_passes("nki-simulator", HEADS),
    "nki, decoding, normalized": lambda: decoding_passes(
        "nki-simulator", replace(HEADS, norm="random")
    ),
    "nki, packed": packed_passes,
    "nki, resets": lambda: judged("nki-simulator", replace(WHOLE, decay="reset")),
    "nki, ragged": lambda: judged("nki-simulator", BY_NAME["ragged"]),
    "nki, words": lambda: layer_passes(WORDS, "nki-simulator"),
    "nki, tokens": lambda: judged_with(
        nki_readout, "MOST_TOKENS", 2, CHECKS["nki's ignored words"]
    ),
    "nki, long sequences": lambda: holds(
        test_gated_delta_layer.test_long_waves_are_narrow, 1025, 3, 3
    ),
    "maps": lambda: holds(test_initial_values.test_maps_are_pytorch_s_own_and_draw_nothing, "gdn"),
    "swapped maps": lambda: holds(
        test_initial_values.test_a_layer_that_is_put_in_a_maps_place_before_is_drawn_as_the_map,
        "gdn",
    ),
    "wrapped maps": lambda: holds(
        test_initial_values.test_a_tag_is_found_behind_what_others_put_around_a_map
    ),
    "lengths": lambda: holds(
        test_dynamic_lengths.test_an_exported_model_takes_every_length, "gdn", 20
    ),
    "lengths of a backend": lambda: holds(
        test_dynamic_lengths.test_a_backend_whose_limits_look_at_the_length_keeps_it
    ),
    "contradicting places": lambda: holds(
        test_packing.test_places_that_contradict_bounds_are_refused, "qwen3_next", None
    ),
    "offloaded before": lambda: holds(
        test_handed_on.TestOffload().test_a_process_that_is_patched_reaches_models_that_were_offloaded_before,
        "qwen3_next",
    ),
    "notes": lambda: with_patches(test_chunked_kernel.test_each_rule_names_its_own_kernel),
    "files": lambda: in_a_folder(test_files.test_so_do_code_and_weights_in_another_format),
    "lazy gates": lambda: holds(test_gates.test_the_formulas_of_lazy_tensors_are_those_of_autograd),
    "lazy products": lambda: holds(test_lazy_product.test_they_are_those_of_pytorch, True),
    "lazy rows": lambda: holds(test_lazy_product.test_a_block_maps_rows_unless_it_is_watched),
    "micro-batches": lambda: holds(
        test_lazy_product.test_micro_batches_of_a_step_add_up_to_the_same_bits
    ),
    "nki's ignored words": lambda: layer_passes("loss_ignored", "nki-simulator"),
    "nki's convolution": lambda: all(
        layer_passes(f"conv_{name}", "nki-simulator")
        for name in ("packed_tiles", "cells", "prefix_tiles")
    ),
    "nki's norm": lambda: all(
        layer_passes(case, "nki-simulator") for case in (WIDE_ROWS, "norm_head")
    ),
    "nki's sigmoid norm": lambda: layer_passes("sigmoid_norm_head", "nki-simulator"),
    "nki's residual": lambda: all(
        layer_passes(f"residual_{name}", "nki-simulator") for name in ("odd", "blocks")
    ),
    "nki's residual in two blocks": lambda: layer_passes(TWO_BLOCKS, "nki-simulator"),
    "nki, tiny scale": lambda: all(
        verdict.passed
        for verdict in rule.verdicts(
            replace(WHOLE, T=20, scale=1e-40), torch.float32, "nki-simulator"
        )
    ),
    "simulator's products": products_are_checked,
    "simulator's releases": releases_differ,
    "simulator's chip": chip_is_followed,
    "simulator's numbers": numbers_are_the_chips,
    "simulator's costs": costs_are_the_measured,
    "values first": values_come_first,
    "nki, K = 256": lambda: judged("nki-simulator", BY_NAME["k256_short"]),
    "nki, layer": mixer_passes,
    "nki, layer's gradients": lambda: mixer_passes("mixer_129", "mixer_packed_empty"),
    "nki, layer's sequences": lambda: mixer_passes("mixer_carry"),
    "convolution": lambda: layer_passes("conv_packed"),
    "norm": lambda: layer_passes("gated_norm_tiny"),
    "norm's sigmoid": lambda: layer_passes("sigmoid_norm_head"),
    "sum": lambda: layer_passes("sum_one"),
    "cross-entropy": lambda: layer_passes("loss_ignored"),
    "residual": lambda: layer_passes("residual_odd"),
    **{name: partial(holds, *check) for name, check in test_stand_ins.CHECKS.items()},
    "recorded bounds": recorded_bounds_pass,
    "bounds written anew": lambda: holds(
        Arguments().test_bounds_that_are_written_anew_are_read_anew,
        torch.int32,
        "numpy",
    ),
    "short parameters": lambda: holds(
        test_states.test_gradients_of_short_parameters_are_rounded_once_and_not_once_a_piece,
        gated_delta_rule,
        torch.float32,
    ),
    "gates' bits": gate_bits_pass,
    "rows of a batch": rows_pass,
    **{
        f"replaced layers, {kind}": partial(holds, REPLACED, "gated_deltanet", kind)
        for kind in ("subclass's call", "own forward", "hook", "pre-hook", "stored")
    },
    "replaced layers, class": lambda: holds(
        test_replaced_layers.test_a_forward_that_was_put_into_the_class_computes
    ),
    "replaced layers, backward hook": lambda: holds(WATCHED, "register_full_backward_hook"),
    "replaced layers, backward pre-hook": lambda: holds(WATCHED, "register_full_backward_pre_hook"),
    "replaced layers, global hook": lambda: holds(
        test_replaced_layers.test_hooks_of_all_modules_are_called,
        torch.nn.modules.module.register_module_forward_hook,
    ),
    "replaced layers, bias": lambda: holds(
        test_replaced_layers.test_a_bias_of_a_map_is_added, "gated_deltanet"
    ),
    "replaced layers, int32": lambda: holds(
        PACKED_GATES, "kimi_delta_attention", ("b_proj",), "int32"
    ),
    "replaced layers, float8": lambda: holds(
        PACKED_GATES, "gated_deltanet", ("a_proj", "b_proj"), "float8_e4m3fn"
    ),
    "replaced layers, readout": lambda: holds(READOUT, "own forward"),
    "replaced layers, new readout": lambda: holds(
        test_replaced_layers.test_a_readout_that_does_more_than_its_rows_say_is_taken_as_a_whole
    ),
    "replaced layers, norm": lambda: holds(
        test_replaced_layers.test_what_stands_in_a_norms_place_computes, test_replaced_layers.hook
    ),
    "replaced layers, convolution": lambda: whole_layers_pass("conv"),
    "replaced layers, norm after the readout": lambda: whole_layers_pass("o_norm"),
    "states": states_pass,
    "muP": widths_pass,
    "named roles": lambda: holds(
        test_widths.TestRoles().test_a_named_role_takes_m_from_the_dimension_that_it_sums_over,
        lambda n: torch.nn.Conv2d(8 * n, 8 * n, 3),
        "hidden",
        4,
    ),
    "Muon's groups": lambda: holds(
        test_widths.TestMuon().test_a_step_of_muon_has_the_spectral_norm_that_what_a_matrix_computes_needs,
        "match_rms_adamw",
    ),
    "tied readout": lambda: holds(
        test_widths.TestTied().test_a_tied_readout_of_a_model_of_torch_is_scaled_and_others_are_refused
    ),
    "initial sizes": lambda: holds(
        test_widths.TestInitialValues().test_sizes_follow_the_base_model_whatever_the_law
    ),
    "loss": loss_passes,
    "padding": padding_passes,
    "kimi": lambda: all(holds(EQUATIONS, variant, 3) for variant in ("kimi", "bounded")),
    "kimi, packed": lambda: all(
        holds(PACKING, variant, [1, 2, 3, 0, 4]) for variant in ("kimi", "bounded")
    ),
    "hidden states": lambda: holds(
        test_language_model.TestPadding().test_hidden_states_of_padded_rows_are_those_of_the_rows_alone
    ),
    "packed loss": lambda: holds(
        test_loss.TestLoss().test_packed_sequences_do_not_predict_across_their_ends
    ),
    "casts": lambda: holds(
        test_weights.TestHeadsStayFloat32().test_a_cast_leaves_numbers_and_gradients_of_our_heads_as_they_are,
        torch.nn.Module.bfloat16,
    ),
    "separate numbers": separate_numbers_pass,
    "constant values": lambda: holds(
        test_ddl_options.test_writes_move_the_stream_as_much_at_every_width, True
    ),
    "beams": lambda: holds(
        test_ddl.test_beams_take_along_what_the_embeddings_and_the_readouts_convolutions_remember
    ),
    "packed rows and a cache": lambda: holds(
        test_packing.test_packed_sequences_cannot_fill_or_continue_a_cache,
        families.make("qwen3_next"),
        2,
    ),
    "bounds": lambda: holds(test_told.TestBounds().test_impossible_bounds_are_refused, "ours"),
    "bounds of a graph": bounds_of_a_graph_pass,
    "packing by steps": lambda: holds(
        test_told.TestEveryLayer().test_so_it_does_in_our_models, "from 1"
    ),
    "steps after a cache": lambda: holds(
        test_told.TestEveryLayer().test_steps_of_tokens_that_continue_a_cache_are_left_alone,
        families.make("qwen3_next"),
    ),
    "steps around padding": lambda: holds(
        test_told.TestEveryLayer().test_places_with_padding,
    ),
    "masks of blocks": lambda: holds(
        test_told.TestMasksOfAttention().test_a_mask_of_blocks_alone_keeps_them_apart_in_every_layer,
        "qwen3_next",
        torch.bool,
    ),
    "masks that contradict": lambda: holds(
        test_told.TestMasksOfAttention().test_masks_that_a_state_cannot_follow_are_refused,
        families.make("qwen3_next"),
    ),
    **{
        f"{how} models": partial(in_a_folder, HANDED_ON["pickle"], "qwen3_next", way)
        for how, way in (("pickled", "pickle"), ("copied", "copy"))
    },
    "pickled from a process": lambda: holds(HANDED_ON["process"]),
    "patched after an offload": lambda: in_a_folder(
        HANDED_ON["offload"], "qwen3_next", "offload", "cpu"
    ),
    "patched before an offload": lambda: in_a_folder(
        HANDED_ON["offload"], "qwen3_next", "patch", "cpu"
    ),
    "others' forward": lambda: holds(HANDED_ON["others"]),
    "casts of a patched model": lambda: holds(
        HANDED_ON["cast"], "kimi_linear", torch.nn.Module.bfloat16
    ),
    "casts of a process": lambda: in_a_folder(HANDED_ON["process's casts"]),
    "values module by module": lambda: holds(
        test_initial_values.test_a_model_that_is_drawn_module_by_module_follows_its_laws, "gdn"
    ),
    "values of a tied readout": lambda: holds(
        test_initial_values.test_a_tied_readout_is_the_embedding_and_one_of_its_own_is_drawn
    ),
    "values of no elements": lambda: holds(
        test_initial_values.test_parameters_of_no_elements_are_named_with_what_to_do
    ),
    "no elements": lambda: holds(HANDED_ON["no elements"]),
    "compiled flash attention": flash_attention_passes,
    "indexed attention": lambda: holds(
        test_packing.test_indexed_attention_refuses_packed_sequences
    ),
    "rates": rates_pass,
    "decay steps": lambda: holds(
        test_optimizers.TestSchedule().test_decay_steps_replaces_steps_as_the_end_of_the_cosine
    ),
    "data order": data_passes,
    "same run": lambda: holds(test_same_run.test_only_paths_of_their_own_disks_may_differ),
    "generator": generator_passes,
}


@pytest.fixture(scope="module")
def green():
    """Remembers which checks passed without a bug."""
    return {}


def passes(check):
    """Returns whether a check passes; an error that the mistake raises counts as red."""
    try:
        return bool(CHECKS[check]())
    except (AssertionError, RuntimeError, ValueError, PositionMismatch, pytest.fail.Exception):
        return False


@contextmanager
def reference_of(bug):
    """Lets a bug in code of the judge's change also what cases are judged by,
    and forgets that afterwards.
    """
    if bug.place.startswith((f"{RULE}.recurrent", f"{RULE}.contract")):
        with patch.object(rule, "reference", lru_cache(maxsize=4)(rule.reference.__wrapped__)):
            yield
    else:
        yield


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_turns_its_check_red(bug, green, without_cpu_kernel):
    backend = (
        "nki-simulator" if bug.check.startswith("nki") else bug.check.split("'")[0].split(",")[0]
    )
    if backend in BACKENDS and (reason := BACKENDS[backend].unavailable("cpu")):
        pytest.skip(reason)
    if bug.check not in green:
        green[bug.check] = passes(bug.check)
    assert green[bug.check], f"{bug.check} is red without a bug"
    with planted(bug), reference_of(bug):
        assert not passes(bug.check), "the bug survives"


def test_many_bugs_are_planted_in_every_part():
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 40
    assert {bug.check for bug in BUGS} == set(CHECKS)
    roots = {bug.place.split(".")[0] for bug in BUGS}
    assert roots == {
        "backends",
        "triton_kernels",
        "nki_kernels",
        "nki_simulator",
        "models",
        "train",
    }


def test_a_line_that_is_gone_is_named():
    bug = replace(BUGS[0], line="no such line")
    with pytest.raises(ValueError, match=r"has 'no such line' 0 times, not once"), planted(bug):
        pass
