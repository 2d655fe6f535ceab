//! All tensors of a fused call in one piece of memory, so that it can be on the host and on a GPU alike, with bytes between
//! the tensors that no kernel may access.

use antiphon_tensor::{DType, Element, with_dtype};

use crate::{
    fused::{Case, From},
    harness::Outcome,
};

/// Where a tensor stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Slot {
    Source,
    ExpertScales,
    Index,
    Shared,
    Bias,
    PreWeight,
    Residual,
    Gamma,
    Scale,
    SumOut,
    ResidualOut,
    NormOut,
    InverseRmsOut,
    Codes,
    Scales,
}

impl Slot {
    const ALL: [Self; 15] = [
        Self::Source,
        Self::ExpertScales,
        Self::Index,
        Self::Shared,
        Self::Bias,
        Self::PreWeight,
        Self::Residual,
        Self::Gamma,
        Self::Scale,
        Self::SumOut,
        Self::ResidualOut,
        Self::NormOut,
        Self::InverseRmsOut,
        Self::Codes,
        Self::Scales,
    ];

    pub fn is_output(self) -> bool {
        self as usize >= Self::SumOut as usize
    }

    /// Bytes of the tokens before `first`.
    pub fn bytes_before(self, case: &Case, first: usize) -> usize {
        match self {
            Self::Source | Self::Residual | Self::SumOut | Self::ResidualOut | Self::NormOut => {
                first * case.hidden * case.dtype.size()
            }
            Self::Codes => first * case.hidden,
            Self::Scales | Self::InverseRmsOut => 4 * first,
            _ => 0,
        }
    }
}

/// Kinds of values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rows {
    /// Numbers of every size and sign.
    Ordinary,
    /// In each row what is rare: see [`strange`].
    Strange,
    /// Indices that there is no row for.
    Astray,
}

const UNTOUCHED: u8 = 0x5A;
/// Bytes behind each tensor, at least.
const GUARD: usize = 64;

/// The bytes of all tensors of a case.
#[derive(Clone)]
pub struct Image {
    /// Aligned as vectors are.
    words: Vec<u128>,
    /// Where each slot begins, and how many bytes it has.
    slots: [(usize, usize); 15],
}

impl Image {
    pub fn new(case: &Case, rank: usize) -> Self {
        let mut end = 0;
        let slots = Slot::ALL.map(|slot| {
            let (start, bytes) = (end, case.bytes(slot));
            end = (start + bytes + GUARD).next_multiple_of(GUARD);
            (start, bytes)
        });
        let words = vec![u128::from_ne_bytes([UNTOUCHED; 16]); end / 16];
        let mut image = Self { words, slots };
        Slot::ALL.into_iter().for_each(|slot| image.fill(case, slot, rank));
        image
    }

    pub fn offset(&self, slot: Slot) -> usize {
        self.slots[slot as usize].0
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: words are 16 bytes, any of which may be read.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr().cast(), 16 * self.words.len()) }
    }

    pub fn base(&mut self) -> *mut u8 {
        self.words.as_mut_ptr().cast()
    }

    pub fn elements<T: Element>(&self, slot: Slot) -> &[T] {
        let (start, bytes) = self.slots[slot as usize];
        // SAFETY: every element may have any bits, and slots begin at multiples of 64.
        unsafe { std::slice::from_raw_parts(self.bytes()[start..].as_ptr().cast(), bytes / size_of::<T>()) }
    }

    pub fn elements_mut<T: Element>(&mut self, slot: Slot) -> &mut [T] {
        let (start, bytes) = self.slots[slot as usize];
        assert!(start + bytes <= 16 * self.words.len());
        // SAFETY: as for `elements`.
        unsafe { std::slice::from_raw_parts_mut(self.base().add(start).cast(), bytes / size_of::<T>()) }
    }

    fn fill(&mut self, case: &Case, slot: Slot, rank: usize) {
        // Ranks differ in everything, also in what they do with the sum.
        let seed = rank + 8 * slot as usize + 1000 * case.seed;
        let hidden = case.hidden;
        match slot {
            Slot::Index => {
                for (entry, index) in self.elements_mut::<i32>(slot).iter_mut().enumerate() {
                    *index = row_for(case, entry, rank);
                }
            }
            Slot::Scale => self.elements_mut::<f32>(slot)[0] = case.scale(),
            Slot::ExpertScales if matches!(case.from, From::Experts(_)) => {
                self.elements_mut::<f32>(slot)
                    .iter_mut()
                    .enumerate()
                    .for_each(|(i, x)| *x = ordinary(i, seed) as f32);
            }
            _ if !case.reads(slot) => {}
            _ => with_dtype!(case.dtype, T => {
                let is_strange = case.rows == Rows::Strange && matches!(slot, Slot::Source | Slot::Residual);
                for (i, element) in self.elements_mut::<T>(slot).iter_mut().enumerate() {
                    let usual = ordinary(i, seed);
                    let value = match is_strange {
                        true => strange(case.dtype, i / hidden, i % hidden, rank, slot).unwrap_or(usual),
                        false => usual,
                    };
                    *element = <T as Element>::from_f64(value);
                }
                if is_strange {
                    self.put_empty_words(case, slot);
                }
            }),
        }
    }

    /// Rows 6, 16, …: the pattern that stands for "not arrived" on the way, in all of the row or in one word.
    fn put_empty_words(&mut self, case: &Case, slot: Slot) {
        let row = case.hidden * case.dtype.size();
        for (index, bytes) in self.elements_mut::<u8>(slot).chunks_exact_mut(row).enumerate() {
            match index % 10 {
                6 => bytes.fill(0xFF),
                9 => bytes[row / 2..][..4].fill(0xFF),
                _ => {}
            }
        }
    }

    /// That nothing else than the outputs differs from what there was before.
    pub fn check_around(&self, after: &Self, what: &str) -> Outcome {
        let outputs = Slot::ALL.iter().zip(self.slots).filter(|(slot, _)| slot.is_output());
        let mut behind = 0;
        for (start, bytes) in outputs.map(|(_, place)| place).chain([(16 * self.words.len(), 0)]) {
            let (a, b) = (&self.bytes()[behind..start], &after.bytes()[behind..start]);
            if let Some(at) = a.iter().zip(b).position(|(a, b)| a != b) {
                return Err(format!("{what}: wrote at {}", self.place(behind + at)).into());
            }
            behind = start + bytes;
        }
        Ok(())
    }

    /// That these bytes are those of this image, everywhere.
    pub fn same(&self, got: &[u8], dtype: DType, what: &str) -> Outcome {
        if got == self.bytes() {
            return Ok(());
        }
        let at = got.iter().zip(self.bytes()).position(|(a, b)| a != b).unwrap_or(0);
        let at = at / dtype.size() * dtype.size();
        let of = |bytes: &[u8]| bytes[at..][..dtype.size()].to_vec();
        let (found, expected) = (of(got), of(self.bytes()));
        let count = got.iter().zip(self.bytes()).filter(|(a, b)| a != b).count();
        let place = self.place(at);
        Err(format!("{what}: {place} is {found:x?}, on the host {expected:x?}; {count} bytes differ").into())
    }

    fn place(&self, at: usize) -> String {
        let slot =
            Slot::ALL.into_iter().rfind(|&slot| self.offset(slot) <= at).expect("the first begins at 0");
        let (start, bytes) = self.slots[slot as usize];
        let inside = if at < start + bytes { "byte" } else { "behind its end, byte" };
        format!("{slot:?}, {inside} {} of {bytes}", at - start)
    }
}

/// Values of every size and sign.
fn ordinary(i: usize, seed: usize) -> f64 {
    let mixed = (i * 2_654_435_761 + seed * 40_503) % 65_521;
    (mixed as f64 - 32_760.0) / 1024.0
}

/// What is rare, by the row: of ten rows some are ordinary.
fn strange(dtype: DType, row: usize, column: usize, rank: usize, slot: Slot) -> Option<f64> {
    let of_source = slot == Slot::Source;
    let (largest, tiny) = match dtype {
        DType::F32 => (f64::from(f32::MAX), 1e-42),
        DType::F16 => (65_504.0, 2e-6),
        _ => (3.3e38, 1e-39),
    };
    match row % 10 {
        1 => Some(-0.0),
        2 if of_source && column == 5 && rank == 1 => Some(f64::NAN),
        3 if of_source && column == 7 && rank == 0 => Some(f64::INFINITY),
        4 if of_source && column == 3 => Some(if rank == 0 { f64::INFINITY } else { f64::NEG_INFINITY }),
        5 => Some(((column % 7) as f64 - 3.0) * tiny),
        7 => Some(if column.is_multiple_of(2) { largest } else { 1.0 }),
        8 => Some(0.0),
        _ => None,
    }
}

/// Which row an entry of the index names: one in five is on another rank.
fn row_for(case: &Case, entry: usize, rank: usize) -> i32 {
    let rows = case.row_count();
    match (case.rows, entry % 11) {
        (Rows::Astray, 3) => rows as i32,
        (Rows::Astray, 5) => -2,
        (Rows::Astray, 7) => i32::MAX,
        (Rows::Astray, 9) => i32::MIN,
        _ if (entry + rank).is_multiple_of(5) => -1,
        _ => ((entry * 7919 + rank) % rows) as i32,
    }
}
