//! Arguments that make no sense: an error with the numbers, before anything is sent.

use antiphon_fabric::Communicator;
use antiphon_moe::{
    Choices, Combine, Dispatch, Moe, MoeConfig, MoeError, Routing, RowFormat, Tokens, layout,
};
use antiphon_tensor::DType;

use crate::{
    case::{Case, Run},
    tensor::Tensor,
};

#[track_caller]
fn refused<T>(outcome: Result<T, MoeError>, text: &str) {
    match outcome {
        Ok(_) => panic!("not refused: {text}"),
        Err(error) => assert_eq!(error.to_string(), text),
    }
}

pub fn arguments_are_refused_with_their_numbers(comm: &Communicator) {
    let world = comm.world_size();
    let case = Case::new(world, 4 * world, 2);
    let run = Run { case: &case, comm, ranks: case.ranks() };
    let mut moe = Moe::new(comm, MoeConfig::default()).unwrap();
    let routes = run.notify(&mut moe);
    let (tokens, rows) = (routes.num_tokens(), routes.rows());

    let combine = |moe: &mut Moe, input: &Tensor, output: &mut Tensor| {
        moe.combine(comm, &routes, Combine::of(input.view(), output.view_mut()))
    };
    let wrong = Tensor::unwritten(DType::F32, &[rows, 16]);
    let mut sums = Tensor::unwritten(DType::F32, &[tokens, 16]);
    refused(
        combine(&mut moe, &wrong, &mut sums),
        "combine: the routes are ones along which nothing was dispatched yet",
    );

    let dispatch = |moe: &mut Moe, from: &Tensor, to: &mut Tensor| {
        let call = Dispatch { tokens: Tokens::of(from.view()), received: Tokens::of(to.view_mut()) };
        moe.dispatch(comm, &routes, call)
    };
    let x = Tensor::unwritten(DType::F32, &[tokens, 16]);
    let mut received = Tensor::unwritten(DType::F32, &[rows, 16]);
    refused(
        dispatch(&mut moe, &Tensor::unwritten(DType::F32, &[tokens + 1, 16]), &mut received),
        &format!("dispatch: the x must be of shape [T, H] = [{tokens}, 16], not [{}, 16]", tokens + 1),
    );
    refused(
        dispatch(&mut moe, &x, &mut Tensor::unwritten(DType::F32, &[rows + 1, 16])),
        &format!("dispatch: the received x must be of shape [N, H] = [{rows}, 16], not [{}, 16]", rows + 1),
    );
    refused(
        dispatch(&mut moe, &Tensor::unwritten(DType::F16, &[tokens, 16]), &mut received),
        "dispatch: the received x must be f16, not f32",
    );
    refused(
        dispatch(&mut moe, &Tensor::unwritten(DType::I64, &[tokens, 16]), &mut received),
        "dispatch: the x must be f32 or f16 or bf16 or f64 or u8 or i8, not i64",
    );
    refused(
        dispatch(&mut moe, &Tensor::unwritten(DType::F16, &[tokens, 12]), &mut received),
        "dispatch: rows of 12 × f16 are 24 bytes, which must be a multiple of 16",
    );
    let ids = Tensor::unwritten(DType::I64, &[tokens, 2]);
    let weights = Tensor::unwritten(DType::F16, &[tokens, 2]);
    let choices = || Some(Choices { ids: ids.view(), weights: weights.view() });
    let call = Dispatch {
        tokens: Tokens { choices: choices(), ..Tokens::of(x.view()) },
        received: Tokens::of(received.view_mut()),
    };
    refused(moe.dispatch(comm, &routes, call), "dispatch: what goes and what comes must have the same parts");
    let (mut to_ids, mut to_weights) =
        (Tensor::unwritten(DType::I64, &[rows, 2]), Tensor::unwritten(DType::F32, &[rows, 2]));
    let to = Choices { ids: to_ids.view_mut(), weights: to_weights.view_mut() };
    let call = Dispatch {
        tokens: Tokens { choices: choices(), ..Tokens::of(x.view()) },
        received: Tokens { choices: Some(to), ..Tokens::of(received.view_mut()) },
    };
    refused(moe.dispatch(comm, &routes, call), "dispatch: the weights must be f32, not f16");

    dispatch(&mut moe, &x, &mut received).unwrap();
    refused(
        combine(&mut moe, &Tensor::unwritten(DType::F32, &[rows + 2, 16]), &mut sums),
        &format!("combine: the rows must be of shape [N, H] = [{rows}, 16], not [{}, 16]", rows + 2),
    );
    refused(
        combine(&mut moe, &Tensor::unwritten(DType::U8, &[rows, 16]), &mut sums),
        "combine: the rows must be f32 or f16 or bf16 or f64, not u8",
    );
    // Nobody was kept waiting, and the routes are as good as before.
    combine(&mut moe, &received, &mut sums).unwrap();
}

pub fn routes_of_others_are_refused(comm: &Communicator) {
    let case = Case::new(comm.world_size(), 4, 2);
    let mut both = [(); 2].map(|()| Moe::new(comm, MoeConfig::default()).unwrap());
    let routes = case.check(comm, &mut both[0]);
    let x = Tensor::unwritten(DType::F32, &[routes.num_tokens(), 16]);
    let mut received = Tensor::unwritten(DType::F32, &[routes.rows(), 16]);
    let call = Dispatch { tokens: Tokens::of(x.view()), received: Tokens::of(received.view_mut()) };
    refused(both[1].dispatch(comm, &routes, call), "dispatch: the routes are of another instance");
    let group = comm.split(Some(0), 0).unwrap().unwrap();
    let call = Dispatch { tokens: Tokens::of(x.view()), received: Tokens::of(received.view_mut()) };
    refused(
        both[0].dispatch(&group, &routes, call),
        "dispatch: the instance belongs to another communicator",
    );
}

pub fn limits_are_named(comm: &Communicator) {
    let ids = |top_k: usize| Tensor::unwritten(DType::I64, &[3, top_k]);
    let world = comm.world_size();
    assert_eq!(world, 2);
    refused(layout(&ids(2).view(), 7, 2), "layout: 7 experts cannot be divided among 2 ranks");
    refused(
        layout(&ids(2).view(), 2050, 2),
        "layout: 2050 experts among 2 ranks are 1025 for each; at most 1024 are served",
    );
    refused(layout(&ids(33).view(), 8, 2), "layout: a token chooses 33 experts; at most 32 are served");
    refused(layout(&ids(2).view(), 9, 9), "layout: 9 ranks; at most 8 are served");
    let flat = Tensor::unwritten(DType::I64, &[6]);
    refused(layout(&flat.view(), 8, 2), "layout: the ids must be of shape [T, K], not [6]");
    let floats = Tensor::unwritten(DType::F32, &[3, 2]);
    refused(layout(&floats.view(), 8, 2), "layout: the ids must be i64 or i32, not f32");

    // A region without room for a row says how much it would need.
    let mut moe = Moe::new(comm, MoeConfig { region_bytes: 128, ..MoeConfig::default() }).unwrap();
    let layout = layout(&ids(2).view(), 8, 2).unwrap();
    let format = RowFormat { hidden: 16, dtype: DType::F32, scales: None };
    let routes = moe.notify(comm, &Routing::of(&layout, format)).unwrap();
    let (x, mut received) =
        (Tensor::unwritten(DType::F32, &[3, 16]), Tensor::unwritten(DType::F32, &[routes.rows(), 16]));
    let call = Dispatch { tokens: Tokens::of(x.view()), received: Tokens::of(received.view_mut()) };
    let text = "dispatch: a row takes 80 bytes, half a region of 128 bytes has 64 (raise region_bytes)";
    refused(moe.dispatch(comm, &routes, call), text);
}
