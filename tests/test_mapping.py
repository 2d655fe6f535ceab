"""``antiphon.comm.Mapping`` against the formulas of FlashInfer's, over all small layouts."""

import copy
import itertools
import pickle
from typing import Any

import pytest

from antiphon.comm import Mapping

SIZES = [1, 2, 3, 4]


def layouts() -> list[dict[str, int]]:
    """Every way to cut up to 16 ranks."""
    result = []
    for tp, cp, pp in itertools.product([1, 2, 4, 6], SIZES, SIZES):
        if tp * cp * pp > 16:
            continue
        for ep, cluster in itertools.product(range(1, tp + 1), repeat=2):
            allowed = (ep == 1 or cp == 1) and (ep == 1 or cluster == 1)
            if allowed and tp % (ep * cluster) == 0:
                sizes = {"tp_size": tp, "cp_size": cp, "pp_size": pp, "moe_ep_size": ep, "moe_cluster_size": cluster}
                result.append({"world_size": tp * cp * pp, **sizes})
    return result


def expected(rank: int, sizes: dict[str, int], gpus_per_node: int) -> dict[str, Any]:
    """All that a mapping says, in plain arithmetic."""
    world, tp, cp, pp, ep, cluster = (
        sizes[name] for name in ("world_size", "tp_size", "cp_size", "pp_size", "moe_ep_size", "moe_cluster_size")
    )
    moe_tp = tp // (ep * cluster)
    tp_rank, cp_rank, pp_rank = rank % tp, rank % (tp * cp) // tp, rank // (tp * cp)
    moe_tp_rank, cluster_rank, ep_rank = tp_rank // (ep * cluster), tp_rank % cluster, tp_rank % ep

    # Experts are cut in every run of `tp` ranks. (FlashInfer's formulas miss some when cp > 1.)
    runs, run = range(0, world, tp), rank // tp
    groups = {
        "pp": [list(range(i, world, tp * cp)) for i in range(tp * cp)],
        "cp": [list(range(i * tp * cp + j, (i + 1) * tp * cp, tp)) for i in range(pp) for j in range(tp)],
        "tp": [list(range(start, start + tp)) for start in runs],
        "moe_tp": [list(range(s + j, s + tp, cluster * ep)) for s in runs for j in range(cluster * ep)],
        "moe_cluster": [
            list(range(s + j * cluster * ep, s + (j + 1) * cluster * ep)) for s in runs for j in range(moe_tp)
        ],
        "moe_ep": [list(range(s + j * ep, s + (j + 1) * ep)) for s in runs for j in range(moe_tp * cluster)],
    }
    own = {
        "pp": cp_rank * tp + tp_rank,
        "cp": pp_rank * tp + tp_rank,
        "tp": pp_rank * cp + cp_rank,
        "moe_tp": run * cluster * ep + cluster_rank * ep + ep_rank,
        "moe_cluster": run * moe_tp + moe_tp_rank,
        "moe_ep": run * moe_tp * cluster + moe_tp_rank * cluster + cluster_rank,
    }
    return {
        **sizes,
        "rank": rank,
        "gpus_per_node": gpus_per_node,
        "moe_tp_size": moe_tp,
        "attn_tp_size": tp * cp,
        "attn_cp_size": 1,
        "auto_parallel": False,
        "enable_attention_dp": False,
        "cp_config": None,
        "tp_rank": tp_rank,
        "cp_rank": cp_rank,
        "pp_rank": pp_rank,
        "moe_tp_rank": moe_tp_rank,
        "moe_cluster_rank": cluster_rank,
        "moe_ep_rank": ep_rank,
        "node_rank": rank // gpus_per_node,
        "local_rank": rank % gpus_per_node,
        **{f"{kind}_groups": each for kind, each in groups.items()},
        **{f"{kind}_group": groups[kind][own[kind]] for kind in groups},
        "has_tp()": tp > 1,
        "has_cp()": cp > 1,
        "has_pp()": pp > 1,
        "has_moe_tp()": moe_tp > 1,
        "has_moe_cluster()": cluster > 1,
        "has_moe_ep()": ep > 1,
        "is_multi_node()": world > gpus_per_node,
        "is_first_pp_rank()": pp_rank == 0,
        "is_last_pp_rank()": pp_rank == pp - 1,
        "is_second_last_pp_rank()": pp_rank == pp - 2,
        "prev_pp_rank()": (rank - tp * cp) % world,
        "next_pp_rank()": (rank + tp * cp) % world,
    }


def said(mapping: Mapping, names: Any) -> dict[str, Any]:
    return {name: getattr(mapping, name[:-2])() if name.endswith("()") else getattr(mapping, name) for name in names}


def test_everything_follows_from_rank_and_sizes() -> None:
    for sizes in layouts():
        mapping = Mapping(gpus_per_node=4, **sizes)
        for rank in range(sizes["world_size"]):
            mapping.rank = rank
            wanted = expected(rank, sizes, 4)
            assert said(mapping, wanted) == wanted, (sizes, rank)


def test_the_sizes_of_experts_and_attention_follow_from_the_others() -> None:
    def sizes(**given: int) -> tuple[int, ...]:
        mapping = Mapping(8, tp_size=8, **given)
        return mapping.moe_tp_size, mapping.moe_ep_size, mapping.moe_cluster_size, mapping.attn_tp_size

    assert sizes() == (8, 1, 1, 8)
    assert sizes(moe_ep_size=4) == (2, 4, 1, 8)
    assert sizes(moe_tp_size=4) == (4, 2, 1, 8)
    assert sizes(moe_cluster_size=2) == (4, 1, 2, 8)
    assert sizes(moe_cluster_size=2, moe_ep_size=1) == (4, 1, 2, 8)
    assert sizes(attn_cp_size=1) == sizes(attn_tp_size=8) == (8, 1, 1, 8)
    assert Mapping(8, tp_size=4, cp_size=2).attn_tp_size == 8


def test_the_defaults_are_one_rank_of_a_node_of_eight() -> None:
    mapping = Mapping()
    assert (mapping.world_size, mapping.rank, mapping.gpus_per_node) == (1, 0, 8)
    assert mapping.tp_groups == mapping.moe_ep_groups == [[0]]


@pytest.mark.parametrize("num_layers", [0, 1, 5, 7, 12])
def test_stages_share_the_layers_in_order(num_layers: int) -> None:
    for pp in SIZES:
        shares = [Mapping(pp, rank, pp_size=pp).pp_layers(num_layers) for rank in range(pp)]
        assert list(itertools.chain(*shares)) == list(range(num_layers))
        counts = [len(share) for share in shares]
        assert counts == sorted(counts, reverse=True) and counts[0] - counts[-1] <= 1  # as torch.tensor_split


def test_ranks_share_the_experts() -> None:
    mapping = Mapping(8, 5, tp_size=8, moe_ep_size=4)
    assert mapping.ep_experts(12) == [3, 4, 5]
    with pytest.raises(ValueError, match="num_experts is 13, but moe_ep_size is 4"):
        mapping.ep_experts(13)
    with pytest.raises(AssertionError, match="cp_size 2"):
        Mapping(2, cp_size=2).ep_experts(8)


def test_any_rank_can_be_placed_on_its_node() -> None:
    mapping = Mapping(16, tp_size=16, gpus_per_node=8)
    assert (mapping.get_node_rank(11), mapping.get_local_rank(11)) == (1, 3)


def test_auto_parallel_leaves_every_rank_alone() -> None:
    mapping = Mapping(4, 2, auto_parallel=True)
    assert (mapping.tp_rank, mapping.cp_rank, mapping.pp_rank) == (0, 0, 0)
    assert mapping.tp_group == [2]


def test_the_identity_is_twelve_values() -> None:
    mapping = Mapping(8, 3, 4, tp_size=4, pp_size=2, moe_ep_size=2)
    values = mapping.to_dict()
    assert values == {
        "world_size": 8,
        "rank": 3,
        "gpus_per_node": 4,
        "cp_size": 1,
        "tp_size": 4,
        "pp_size": 2,
        "moe_tp_size": 2,
        "moe_cluster_size": 1,
        "moe_ep_size": 2,
        "attn_tp_size": 4,
        "attn_cp_size": 1,
        "auto_parallel": False,
    }
    same = Mapping.from_dict({**values, "cp_config": {"cp_type": "ring"}, "enable_attention_dp": True})
    assert same == mapping and hash(same) == hash(mapping)
    assert eval(repr(mapping)) == mapping
    other = Mapping.from_dict({**values, "rank": 4})
    assert other != mapping and mapping != values and len({mapping, same, other}) == 2


def test_copies_keep_what_was_given() -> None:
    mapping = Mapping(4, 1, tp_size=4, cp_config={"block_size": 64}, enable_attention_dp=True)
    for other in pickle.loads(pickle.dumps(mapping)), copy.copy(mapping), copy.deepcopy(mapping):
        assert type(other) is Mapping and other == mapping
        assert (other.cp_config, other.enable_attention_dp) == ({"block_size": 64}, True)


def test_it_can_be_a_base() -> None:
    class Named(Mapping):
        name = "mine"

    mapping = Named(2, 1, tp_size=2)
    assert mapping.tp_group == [0, 1] and isinstance(Named.from_dict(mapping.to_dict()), Named)


@pytest.mark.parametrize(
    ("keywords", "kind", "text"),
    [
        ({"world_size": 8, "tp_size": 4}, ValueError, "tp_size 4 × pp_size 1 × cp_size 1 = 4, but world_size is 8"),
        ({"world_size": 4, "tp_size": 4, "moe_tp_size": 2, "moe_ep_size": 4}, ValueError, "but tp_size is 4"),
        ({"world_size": 4, "tp_size": 4, "attn_tp_size": 2}, ValueError, "attn_cp_size must be 1"),
        ({"world_size": 2, "tp_size": 2, "auto_parallel": True}, ValueError, "auto_parallel"),
        ({"world_size": 2, "cp_size": 2, "auto_parallel": True}, ValueError, "auto_parallel"),
        ({"world_size": 2, "tp_size": 2, "rank": 2}, ValueError, "rank 2 is out of range: world_size is 2"),
        ({"rank": -1}, ValueError, "rank is -1"),
        ({"rank": "0"}, ValueError, "rank is '0'"),
        ({"tp_size": 0}, ValueError, "tp_size must be at least 1"),
        ({"tp_size": -1}, ValueError, "tp_size must not be negative, but it is -1"),
        ({"moe_ep_size": -2}, ValueError, "moe_ep_size must not be negative, but it is -2"),
        ({"world_size": 4, "tp_size": 2, "cp_size": 2, "moe_ep_size": 2}, NotImplementedError, "cp_size 2"),
        (
            {"world_size": 4, "tp_size": 4, "moe_ep_size": 2, "moe_cluster_size": 2},
            AssertionError,
            "moe_cluster_size 2",
        ),
    ],
)
def test_layouts_that_make_no_sense_are_refused(keywords: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        Mapping(**keywords)


@pytest.mark.parametrize("rank", [2, -1, "1", None])
def test_a_rank_outside_the_world_is_refused_and_changes_nothing(rank: Any) -> None:
    mapping = Mapping(2, 1, tp_size=2)
    with pytest.raises(ValueError, match="rank"):
        mapping.rank = rank
    assert mapping.rank == 1
