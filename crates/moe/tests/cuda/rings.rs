//! Rings of few places, which a call fills many times over. Ranks then wait for room at each other: no order of tokens, and no
//! number of multiprocessors, may make them wait in a circle.

use antiphon_moe::MoeConfig;
use antiphon_tensor::DType;

use crate::{
    by_expert::check as check_by_expert,
    cases::{
        by_expert::{ByExpertCase, Choice as ByExpertChoice},
        by_token::{Case, Choice},
    },
    check, on_gpus,
};

/// The bytes of a record of the cases below: a row of 64 × f32, with what lies beside it, in whole lines of 128 bytes.
const RECORD_BYTES: usize = 384;
const TOKENS: usize = 96;

fn config(world: usize, places: usize, num_sms: u32) -> MoeConfig {
    for_records(RECORD_BYTES, world, places, num_sms)
}

fn for_records(bytes: usize, world: usize, places: usize, num_sms: u32) -> MoeConfig {
    let region_bytes = 3 * (world - 1) * places * bytes; // a ring for each peer in each of three slots
    MoeConfig { region_bytes, num_sms, ..MoeConfig::for_gpus() }
}

/// Tokens that choose one rank, in halves; or two at random; or all.
fn rows_come_back(world: usize, places: usize, num_sms: u32) {
    on_gpus(world, config(world, places, num_sms), |rank| {
        for (choice, top_k) in [(Choice::InHalves, 1), (Choice::Wild, 2), (Choice::Spread, world.min(4))] {
            let tokens = vec![TOKENS; world];
            check(rank, &Case { choice, tokens, hidden: 64, seed: 7, ..Case::new(world, world, top_k) })?;
        }
        Ok(())
    });
}

fn sums_come_back(world: usize, places: usize, num_sms: u32) {
    on_gpus(world, config(world, places, num_sms), |rank| {
        for choice in [ByExpertChoice::InHalves, ByExpertChoice::OneIn(3), ByExpertChoice::OneIn(1)] {
            for pad_multiple in [Some(1), None] {
                let tokens = vec![TOKENS; world];
                let case =
                    ByExpertCase { choice, tokens, hidden: 64, pad_multiple, ..ByExpertCase::new(world, 1) };
                check_by_expert(rank, &ByExpertCase { dtype: DType::F32, ..case })?;
            }
        }
        Ok(())
    });
}

macro_rules! worlds {
    ($($rows:ident $sums:ident of $world:literal: $cases:expr;)*) => {$(
        #[test]
        fn $rows() {
            $cases.into_iter().for_each(|(places, num_sms)| rows_come_back($world, places, num_sms));
        }

        #[test]
        fn $sums() {
            $cases.into_iter().for_each(|(places, num_sms)| sums_come_back($world, places, num_sms));
        }
    )*};
}

worlds! {
    wrapped_rings_end_on_2_gpus by_expert_wrapped_rings_end_on_2_gpus of 2: [(2, 1), (16, 2)];
    wrapped_rings_end_on_3_gpus by_expert_wrapped_rings_end_on_3_gpus of 3: [(2, 1), (16, 1), (4, 2)];
    wrapped_rings_end_on_4_gpus by_expert_wrapped_rings_end_on_4_gpus of 4: [(2, 2), (16, 1)];
    wrapped_rings_end_on_8_gpus by_expert_wrapped_rings_end_on_8_gpus of 8: [(2, 1), (6, 2)];
    // Most warps have nothing to send, and wait beside those that have.
    rings_of_24_multiprocessors_end_on_3_gpus by_expert_rings_of_24_multiprocessors_end_on_3_gpus of 3: [(2, 24), (16, 24)];
}

/// A rank's blocks share out what the rank has, so ranks need not agree on how many there are; those that leave it open have other numbers
/// when their tokens are not as many.
#[test]
fn ranks_differ_in_their_multiprocessors_on_3_gpus() {
    on_gpus(3, config(3, 4, 0), |rank| {
        let case = Case {
            choice: Choice::Wild,
            tokens: vec![TOKENS, 5, 33],
            hidden: 64,
            seed: 7,
            ..Case::new(3, 3, 2)
        };
        check(rank, &case)?;
        rank.moe.set_num_sms([1, 7, 2][rank.comm.rank()])?;
        check(rank, &case)?;
        let tokens = vec![TOKENS, 5, 33];
        let case = ByExpertCase { tokens, hidden: 64, pad_multiple: None, ..ByExpertCase::new(3, 1) };
        check_by_expert(rank, &ByExpertCase { choice: ByExpertChoice::OneIn(3), dtype: DType::F32, ..case })
    });
}

/// Tokens that choose more experts of a rank than a warp has lanes; a receiver counts a record as read also if it drops all of its rows.
#[test]
fn by_expert_records_of_many_choices_make_room_on_2_gpus() {
    const LOCAL: usize = 40;
    let words = 4 * 2 * LOCAL; // a choice and a prob for each expert
    on_gpus(2, for_records((256 + words).next_multiple_of(128), 2, 2, 1), |rank| {
        let case =
            ByExpertCase { choice: ByExpertChoice::OneIn(1), hidden: 64, ..ByExpertCase::new(2, LOCAL) };
        let case = ByExpertCase { dtype: DType::F32, tokens: vec![24; 2], pad_multiple: Some(1), ..case };
        for capacity in [None, Some(vec![0, 1000])] {
            check_by_expert(rank, &ByExpertCase { capacity, ..case.clone() })?;
        }
        check_by_expert(rank, &ByExpertCase { probs: false, ..case })
    });
}
