"""The fused calls as operators of torch, which compiled programs call in place of the functions."""

from typing import Any

from antiphon._operators import Operators
from antiphon.comm import _custom, _fusion, _moe

_operators = Operators()


def _nothing(*arguments: Any) -> None:
    pass


_operators.define(
    "trtllm_allreduce_fusion(Tensor allreduce_in, Tensor workspace_ptrs, int world_size, int world_rank,"
    " SymInt token_num, SymInt hidden_dim, bool fp32_acc, int pattern_code, bool? use_oneshot,"
    " Tensor(a!)? allreduce_out, Tensor? residual_in, Tensor(b!)? residual_out, Tensor(c!)? norm_out,"
    " Tensor(d!)? quant_out, Tensor(e!)? scale_out, Tensor? rms_gamma, float? rms_eps, Tensor? scale_tensor,"
    " float? scale_factor, int? layout_code, int? block_quant_group_size, float? weight_bias,"
    " int? workspace_id) -> ()",
    _fusion.run,
    _nothing,
)
_operators.define(
    "trtllm_moe_allreduce_fusion(Tensor workspace_ptrs, int world_size, int world_rank, SymInt token_num,"
    " SymInt hidden_dim, Tensor? residual_in, Tensor? rms_gamma, float? rms_eps, Tensor? scale_tensor,"
    " float? scale_factor, int num_experts, Tensor scale_input, Tensor active_experts_token_input, Tensor token_input,"
    " int? layout_code, Tensor(a!)? moe_allreduce_out, Tensor(b!)? residual_out, Tensor(c!)? norm_out,"
    " Tensor(d!)? quant_out, Tensor(e!)? scale_out, float? weight_bias) -> ()",
    _moe.run_reduction,
    _nothing,
)
_operators.define(
    "trtllm_moe_finalize_allreduce_fusion(Tensor allreduce_in, Tensor residual_in, Tensor norm_weight,"
    " Tensor expanded_idx_to_permuted_idx, Tensor(a!)? norm_out, Tensor(b!)? residual_out, Tensor(c!)? quant_out,"
    " Tensor(d!)? scale_out, Tensor workspace_ptrs, int? world_rank, int? world_size, float? eps,"
    " Tensor? shared_expert_output, Tensor? expert_scale_factor, float? routed_scaling_factor, float? weight_bias,"
    " Tensor? scale_tensor, float? scale_factor, int? layout_code) -> ()",
    _moe.run_finalize,
    _nothing,
)
_operators.define(
    "trtllm_custom_all_reduce(Tensor inp, Tensor(a!) out, int tp_size, int tp_rank, SymInt token_num,"
    " int fusion_op_code, int strategy_code, int config_code, Tensor peer_comm_buffer_ptrs, Tensor? bias,"
    " Tensor? residual, Tensor? weight, Tensor? weight_pre_residual_norm, float? eps,"
    " Tensor(b!)? intermediate_buffer) -> ()",
    _custom.run,
    _nothing,
)
