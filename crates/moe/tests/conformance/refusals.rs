//! Arguments that make no sense: an error with the numbers, before anything is sent.

use antiphon_moe::{Choices, Combine, Dispatch, MoeConfig, MoeError, Tokens, layout};
use antiphon_tensor::DType;
use antiphon_testing::{
    Tensor,
    backend::{Host, Ranks},
};

use crate::{
    cases::{by_token::Case, tensor::Array},
    harness::MoeBackend,
    run::Run,
};

#[track_caller]
pub fn refused<T>(outcome: Result<T, MoeError>, text: &str) {
    match outcome {
        Ok(_) => panic!("not refused: {text}"),
        Err(error) => assert_eq!(error.to_string(), text),
    }
}

/// "f32 or f16"
pub fn names(dtypes: &[DType]) -> String {
    dtypes.iter().map(DType::to_string).collect::<Vec<_>>().join(" or ")
}

pub fn arguments_are_refused_with_their_numbers<B: MoeBackend>(rank: &B) {
    let world = rank.world_size();
    let case = Case::new(world, 4 * world, 2);
    let run = Run { case: &case, rank, ranks: case.ranks() };
    let moe = &mut rank.opened(MoeConfig::default());
    let routes = run.notify(moe);
    let (tokens, rows) = (case.tokens[rank.rank()], B::rows(&routes));
    let unwritten = |dtype, shape: [usize; 2]| Tensor::unwritten(rank, dtype, &shape);

    let combine = |moe: &mut B::Moe, input: &Tensor<B>, output: &mut Tensor<B>| {
        rank.combine(moe, &routes, Combine::of(input.view(), output.view_mut()))
    };
    let wrong = unwritten(DType::F32, [rows, 16]);
    let mut sums = unwritten(DType::F32, [tokens, 16]);
    refused(
        combine(moe, &wrong, &mut sums),
        "combine: the routes are ones along which nothing was dispatched yet",
    );

    let dispatch = |moe: &mut B::Moe, from: &Tensor<B>, to: &mut Tensor<B>| {
        let call = Dispatch { tokens: Tokens::of(from.view()), received: Tokens::of(to.view_mut()) };
        rank.dispatch(moe, &routes, call)
    };
    let x = unwritten(DType::F32, [tokens, 16]);
    let mut received = unwritten(DType::F32, [rows, 16]);
    refused(
        dispatch(moe, &unwritten(DType::F32, [tokens + 1, 16]), &mut received),
        &format!("dispatch: the x must be of shape [T, H] = [{tokens}, 16], not [{}, 16]", tokens + 1),
    );
    refused(
        dispatch(moe, &x, &mut unwritten(DType::F32, [rows + 1, 16])),
        &format!("dispatch: the received x must be of shape [N, H] = [{rows}, 16], not [{}, 16]", rows + 1),
    );
    refused(
        dispatch(moe, &unwritten(DType::F16, [tokens, 16]), &mut received),
        "dispatch: the received x must be f16, not f32",
    );
    refused(
        dispatch(moe, &unwritten(DType::I64, [tokens, 16]), &mut received),
        "dispatch: the x must be f32 or f16 or bf16 or f64 or u8 or i8, not i64",
    );
    refused(
        dispatch(moe, &unwritten(DType::F16, [tokens, 12]), &mut received),
        "dispatch: rows of 12 × f16 are 24 bytes, which must be a multiple of 16",
    );
    let ids = unwritten(DType::I64, [tokens, 2]);
    let weights = unwritten(DType::F16, [tokens, 2]);
    let choices = || Some(Choices { ids: ids.view(), weights: weights.view() });
    let call = Dispatch {
        tokens: Tokens { choices: choices(), ..Tokens::of(x.view()) },
        received: Tokens::of(received.view_mut()),
    };
    refused(rank.dispatch(moe, &routes, call), "dispatch: what goes and what comes must have the same parts");
    let (mut to_ids, mut to_weights) = (unwritten(DType::I64, [rows, 2]), unwritten(DType::F32, [rows, 2]));
    let to = Choices { ids: to_ids.view_mut(), weights: to_weights.view_mut() };
    let call = Dispatch {
        tokens: Tokens { choices: choices(), ..Tokens::of(x.view()) },
        received: Tokens { choices: Some(to), ..Tokens::of(received.view_mut()) },
    };
    refused(rank.dispatch(moe, &routes, call), "dispatch: the weights must be f32, not f16");

    dispatch(moe, &x, &mut received).unwrap();
    refused(
        combine(moe, &unwritten(DType::F32, [rows + 2, 16]), &mut sums),
        &format!("combine: the rows must be of shape [N, H] = [{rows}, 16], not [{}, 16]", rows + 2),
    );
    refused(
        combine(moe, &unwritten(DType::U8, [rows, 16]), &mut sums),
        &format!("combine: the rows must be {}, not u8", names(B::SUMMED)),
    );
    // Nobody was kept waiting, and the routes are as good as before.
    combine(moe, &received, &mut sums).unwrap();
}

pub fn routes_of_others_are_refused<B: MoeBackend>(rank: &B) {
    let case = Case::new(rank.world_size(), 4, 2);
    let both = &mut [(); 2].map(|()| rank.opened(MoeConfig::default()));
    let routes = case.check(rank, &mut both[0]);
    let x = Tensor::unwritten(rank, DType::F32, &[case.tokens[rank.rank()], 16]);
    let mut received = Tensor::unwritten(rank, DType::F32, &[B::rows(&routes), 16]);
    let call = Dispatch { tokens: Tokens::of(x.view()), received: Tokens::of(received.view_mut()) };
    refused(rank.dispatch(&mut both[1], &routes, call), "dispatch: the routes are of another instance");
}

/// The host's calls name the communicator.
pub fn another_communicator_is_refused<R: Ranks>(rank: &Host<R>) {
    let case = Case::new(rank.world_size(), 4, 2);
    let moe = &mut rank.opened(MoeConfig::default());
    let routes = case.check(rank, moe);
    let group = rank.split(Some(0), 0).unwrap().unwrap();
    let x = Array::unwritten(DType::F32, &[routes.num_tokens(), 16]);
    let mut received = Array::unwritten(DType::F32, &[routes.rows(), 16]);
    let call = Dispatch { tokens: Tokens::of(x.view()), received: Tokens::of(received.view_mut()) };
    refused(moe.dispatch(&group, &routes, call), "dispatch: the instance belongs to another communicator");
}

pub fn limits_are_named<B: MoeBackend>(rank: &B) {
    assert_eq!(rank.world_size(), 2);
    let region_bytes = rank.region_of(2, 64);
    let moe = &mut rank.opened(MoeConfig { region_bytes, ..MoeConfig::default() });
    let tensor = |dtype, shape: &[usize]| Tensor::unwritten(rank, dtype, shape);
    let ids = |top_k: usize| tensor(DType::I64, &[3, top_k]);
    refused(rank.layout(moe, &ids(2), 7), "layout: 7 experts cannot be divided among 2 ranks");
    refused(
        rank.layout(moe, &ids(2), 2050),
        "layout: 2050 experts among 2 ranks are 1025 for each; at most 1024 are served",
    );
    refused(rank.layout(moe, &ids(33), 8), "layout: a token chooses 33 experts; at most 32 are served");
    let floats = tensor(DType::F32, &[3, 2]);
    refused(rank.layout(moe, &floats, 8), "layout: the ids must be i64 or i32, not f32");
    let of_host = Array::unwritten(DType::I64, &[3, 2]);
    refused(layout(&of_host.view(), 9, 9), "layout: 9 ranks; at most 8 are served");
    let flat = Array::unwritten(DType::I64, &[6]);
    refused(layout(&flat.view(), 8, 2), "layout: the ids must be of shape [T, K], not [6]");

    // A region without room for a row says how much it would need.
    let case = Case { hidden: 1024, tokens: vec![3; 2], ..Case::new(2, 8, 2) };
    let routes = Run { case: &case, rank, ranks: case.ranks() }.notify(moe);
    let (x, mut received) = (tensor(DType::F32, &[3, 1024]), tensor(DType::F32, &[B::rows(&routes), 1024]));
    let call = Dispatch { tokens: Tokens::of(x.view()), received: Tokens::of(received.view_mut()) };
    let error = rank.dispatch(moe, &routes, call).expect_err("the region is too small");
    let MoeError::Region { needed, half, region_bytes: its, .. } = error else { panic!("{error}") };
    assert!(needed >= 4096 && half < needed && its == region_bytes, "{error}");
}
