"""A Megatron policy worker: references, schedules, checkpoints, refusals, and refits of live ranks."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from refit_transport.engines.tensors import TensorSink
from refit_transport.layout.region import Region
from refit_transport.rl.policy.megatron_cpu import on_cpu
from refit_transport.rl.policy.megatron_model import build_chunks, initialize_groups
from refit_transport.session.member import RefitMember
from refit_transport.trainers.megatron import MegatronSource
from tests.megatron.cases import Case, cut
from tests.megatron.steps import LOSS, ROWS, make_batch, make_worker, stored
from tests.models import read_checkpoint
from tests.session import ranks as sessions
from tests.trainers.forked_ranks import run_ranks

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install -e '.[megatron]'")

DENSE = Case("qwen3", 2, cut(tp=2), {"num_hidden_layers": 1})
EXPERTS = Case("qwen3_moe", 2, cut(ep=2), {"num_hidden_layers": 1})
PIPELINE = Case("qwen3", 2, cut(pp=2))
SCHEDULE = [{"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.5, "total_iters": 2}}]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return {
        case.family + str(case.cut): case.checkpoint(tmp_path_factory.mktemp("model"))
        for case in (DENSE, EXPERTS, PIPELINE)
    }


def path_of(checkpoints, case):
    return checkpoints[case.family + str(case.cut)]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("case", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_resuming_continues_bit_for_bit(checkpoints, tmp_path, case, distributed, precision):
    optimizer = {"lr": 1e-2, "use_distributed_optimizer": distributed}
    overrides = dict(precision=precision, scheduler=SCHEDULE, megatron_cfg={**case.cut, "optimizer": optimizer})

    def rank_body(rank):
        worker = make_worker(rank, case, path_of(checkpoints, case), **overrides)
        worker.train(make_batch(), LOSS)
        worker.save_checkpoint(tmp_path / "step1", {"step": 1})
        metrics = worker.train(make_batch(), LOSS)
        weights = stored(worker)
        extra = worker.load_checkpoint(tmp_path / "step1")
        again = worker.train(make_batch(), LOSS)
        same = all(torch.equal(a[3], b[3]) for a, b in zip(weights, stored(worker), strict=True))
        return extra, same, metrics == again, [metrics["lr"], worker.train(make_batch(), LOSS)["lr"]]

    assert run_ranks(2, rank_body) == [({"step": 1}, True, True, pytest.approx([0.75e-2, 1e-2]))] * 2
    assert [p.name for p in tmp_path.iterdir()] == ["step1"]


def test_another_layout_cannot_read_a_checkpoint(checkpoints, tmp_path):
    path = path_of(checkpoints, DENSE)

    def save(rank):
        make_worker(rank, DENSE, path).save_checkpoint(tmp_path / "tp2", {})

    def load(rank):
        worker = make_worker(rank, Case("qwen3", 2, cut()), path)
        with pytest.raises(ValueError, match=r"'tensor': 2.* allowed is the same layout"):
            worker.load_checkpoint(tmp_path / "tp2")
        with pytest.raises(FileNotFoundError, match=r"no complete checkpoint at .*nowhere"):
            worker.load_checkpoint(tmp_path / "nowhere")

    run_ranks(2, save)
    run_ranks(2, load)


def test_reference_logprobs_stay_and_leave_the_weights_untouched(checkpoints):
    def rank_body(rank):
        worker = make_worker(rank, DENSE, path_of(checkpoints, DENSE))
        with pytest.raises(RuntimeError, match="keep_reference"):
            worker.reference_logprobs(make_batch())
        before = worker.logprobs(make_batch())
        worker.keep_reference()
        worker.train(make_batch(), LOSS)
        trained = stored(worker)
        reference = worker.reference_logprobs(make_batch())
        untouched = all(torch.equal(a[3], b[3]) for a, b in zip(trained, stored(worker), strict=True))
        return torch.equal(before, reference), untouched, torch.equal(before, worker.logprobs(make_batch()))

    assert run_ranks(2, rank_body) == [(True, True, False)] * 2


def test_one_rank_of_a_model_replica_speaks_for_all_of_its_rows(checkpoints):
    def rank_body(rank):
        worker = make_worker(rank, PIPELINE, path_of(checkpoints, PIPELINE))
        return worker.tp_rank, list(worker.rows(ROWS))

    assert run_ranks(2, rank_body) == [(1, [0, 1, 2, 3, 4]), (0, [0, 1, 2, 3, 4])]


@pytest.mark.parametrize("overrides", [{"generation": {"temperature": 0.7}}, {"logprob_chunk_size": 2}])
def test_temperature_and_chunks_change_log_probabilities_as_in_one_process(checkpoints, overrides):
    import transformers

    from refit_transport.rl.policy.logprobs import token_logprobs

    path = path_of(checkpoints, DENSE)
    batch = make_batch()
    with torch.no_grad():
        logits = transformers.AutoModelForCausalLM.from_pretrained(path)(input_ids=batch["input_ids"]).logits
    temperature = overrides.get("generation", {}).get("temperature", 1.0)
    expected = token_logprobs(logits, batch["input_ids"], temperature)
    inside = torch.arange(expected.shape[1])[None] < batch["input_lengths"][:, None]

    def rank_body(rank):
        return make_worker(rank, DENSE, path, **overrides).logprobs(batch)

    for got in run_ranks(2, rank_body):
        torch.testing.assert_close(got, torch.where(inside, expected, 0.0), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case("qwen3", 1, cut(mtp_num_layers=1)), "the family's checkpoints have no name for multi-token-prediction"),
        (Case("nemotron_h", 1), "model_type nemotron_h has no Megatron trainer, allowed: llama"),
        (Case("llama", 1, model={"attention_bias": True}), "a model with attention_bias: true has no Megatron trainer"),
    ],
)
def test_models_without_a_megatron_trainer_are_refused(tmp_path, case, message):
    def rank_body(rank):
        with pytest.raises(ValueError, match=message):
            make_worker(rank, case, tmp_path)

    case.checkpoint(tmp_path)
    run_ranks(1, rank_body)


def test_float16_is_refused(checkpoints):
    def rank_body(rank):
        with pytest.raises(ValueError, match="got float16 with the Megatron trainer"):
            make_worker(rank, Case("qwen3", 1, cut()), path_of(checkpoints, DENSE), precision="float16")

    run_ranks(1, rank_body)


def test_nothing_stands_in_for_a_gpu_that_is_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="this machine has a CUDA device"), on_cpu():
        pass


def test_stand_ins_for_cuda_end_with_the_call():
    before = torch.cuda.current_device, torch.cuda.Stream, dist.all_gather
    with on_cpu():
        assert torch.ones(2, device="cuda").device.type == "cpu"
    assert before == (torch.cuda.current_device, torch.cuda.Stream, dist.all_gather)


def test_a_refit_waits_for_parameters_that_are_gathered_late(checkpoints):
    """The distributed optimizer leaves each rank with its own share of the new weights until they are gathered."""
    path = path_of(checkpoints, DENSE)

    def rank_body(rank):
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        facts = json.loads((path / "config.json").read_text())
        with on_cpu():
            initialize_groups(cut())
            (bare,) = build_chunks(facts, cut(), torch.float32, 64)
            options = DistributedDataParallelConfig(
                overlap_grad_reduce=True, overlap_param_gather=True, use_distributed_optimizer=True
            )
            model = DistributedDataParallel(bare.config, options, bare)
            source = MegatronSource(model, facts)
            for buffer in model.buffers:
                buffer.param_data.fill_(torch.nan)
                buffer.param_data.chunk(2)[rank].fill_(rank + 1.0)
            source.refresh()
        held = [source.view(name, region) for name, regions in source.holdings().items() for region in regions]
        return torch.cat([view.reshape(-1) for view in held]).unique().tolist()

    assert run_ranks(2, rank_body) == [[1.0, 2.0]] * 2


class Column:
    """An engine rank's half of the last dimension of every tensor."""

    def __init__(self, tensors, half):
        self.held = {}
        for name, tensor in tensors.items():
            shape = tuple(tensor.shape)
            low, high = half * shape[-1] // 2, (half + 1) * shape[-1] // 2
            region = Region((0,) * (len(shape) - 1) + (low,), (*shape[:-1], high))
            self.held[name] = [] if region.empty else [(region, torch.zeros(region.shape))]


@pytest.mark.parametrize("case", [DENSE, EXPERTS, PIPELINE], ids=["tp2", "ep2", "pp2"])
def test_engines_have_the_trained_weights_after_every_refit(checkpoints, tmp_path, case):
    path = path_of(checkpoints, case)
    world = sessions.World(trainers=2, engines=2)

    def body(world, rank, address):
        if rank >= 2:
            columns = Column(read_checkpoint(path), rank - 2)
            member = RefitMember.join(address, rank=rank, role="engine", sink=TensorSink(columns.held), timeout=60)
            versions = []
            for version in (1, 2):
                member.refit(version, timeout=60)
                versions.append([(n, r, t.clone()) for n, held in columns.held.items() for r, t in held])
            member.leave()
            return versions
        store = f"file://{tmp_path}/store"
        dist.init_process_group("gloo", store, world_size=2, rank=rank, timeout=timedelta(seconds=60))
        worker = make_worker(rank, case, path)
        member = RefitMember.join(address, rank=rank, role="trainer", source=worker.source(), timeout=60)
        versions = []
        for version in (1, 2):
            worker.train(make_batch(), LOSS)
            member.refit(version, timeout=60)
            versions.append([(n, r, t) for n, _, r, t in stored(worker)])
        dist.barrier()
        member.leave()
        return versions

    results = sessions.run_ranks(world, body)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    for version in (0, 1):
        trained = {}
        for name, region, value in (piece for rank in results[:2] for piece in rank[version]):
            trained.setdefault(name, torch.full(tuple(read_checkpoint(path)[name].shape), torch.nan))
            trained[name][region.slices()] = value
        for name, region, value in (piece for rank in results[2:] for piece in rank[version]):
            assert torch.equal(value, trained[name][region.slices()]), (name, region)
    assert not torch.equal(results[2][0][0][2], results[2][1][0][2])
