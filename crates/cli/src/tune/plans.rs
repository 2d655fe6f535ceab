//! `antiphon tune --plans`: measures the plans of a folder beside this library's own calls.

use std::{
    io::{Write, stdout},
    num::NonZeroUsize,
    ops::RangeInclusive,
    path::{Path, PathBuf},
    time::Duration,
};

use antiphon::{
    collectives::{
        Communicator,
        cuda::{CudaBuilder, CudaCollectives},
    },
    device::{
        ReduceOp,
        cuda::{Context, Driver},
    },
    tensor::DType,
    tuning::{Cache, doubling},
};
use antiphon_executor::cuda::{AlgorithmCollection, CudaOptions};
use antiphon_plan::verify::{Memory, VerifiedPlan};

use super::Result;
use crate::{
    ExitStatus, SUCCESS,
    launch::{Launch, World},
    plan::{enough_gpus, prove, read},
    sizes::Sizes,
};

/// How plans are measured.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Plans")]
pub struct Plans {
    /// On cuda: measure the plans of this folder (its .json files) beside the built-in calls instead, for collections of the same plans
    #[arg(long, value_name = "DIR", conflicts_with = "moe")]
    pub plans: Option<PathBuf>,

    /// The kind of elements: f64, f32, f16, bf16, i64, i32, i8, u8
    #[arg(long, default_value = "bf16", requires = "plans", value_parser = crate::bench::numeric)]
    dtype: DType,

    /// The least and the greatest message in bytes, from which sizes double
    #[arg(long, default_value = "1K..16M", requires = "plans")]
    sizes: Sizes,

    /// How many ranks share a GPU. Times mean something if NVIDIA's MPS is on
    #[arg(long, value_name = "N", requires = "plans")]
    ranks_per_gpu: Option<NonZeroUsize>,

    /// Choose among plans whose results may differ in their last bits, too
    #[arg(long, requires = "plans")]
    allow_other_bits: bool,
}

impl Plans {
    fn ranks_per_gpu(&self) -> usize {
        self.ranks_per_gpu.map_or(1, NonZeroUsize::get)
    }

    fn range(&self) -> RangeInclusive<usize> {
        let ends = [self.sizes.0.iter().min(), self.sizes.0.iter().max()];
        let [least, most] = ends.map(|end| end.copied().unwrap_or_default() as usize);
        least..=most
    }
}

/// Starts the ranks for which the folder's plans are.
pub(super) fn start(args: &Plans, folder: &Path, ranks: Option<usize>) -> Result<ExitStatus> {
    let plans = proved(folder)?;
    let ranks = ranks.unwrap_or_else(|| plans[0].1.plan().num_ranks());
    for (file, plan) in &plans {
        let its = plan.plan().num_ranks();
        if its != ranks {
            return Err(format!("{}: the plan is for {its} ranks, not {ranks}", file.display()).into());
        }
    }
    enough_gpus(ranks, args.ranks_per_gpu())?;
    Ok(Launch::workers(ranks, World::around(Some(ranks))?)?)
}

/// The plans of a folder in the order of their files' names, each proved for the memory of GPUs.
fn proved(folder: &Path) -> Result<Vec<(PathBuf, VerifiedPlan)>> {
    let about = |error: std::io::Error| format!("{}: {error}", folder.display());
    let files = std::fs::read_dir(folder).map_err(about)?.map(|entry| entry.map(|entry| entry.path()));
    let mut files = files.collect::<std::io::Result<Vec<_>>>().map_err(about)?;
    files.retain(|file| file.extension().is_some_and(|extension| extension == "json"));
    files.sort();
    if files.is_empty() {
        return Err(format!("{}: there is no plan, no file *.json", folder.display()).into());
    }
    let plan = |file: PathBuf| -> Result<_> {
        let proof = prove(&read(&file)?, Memory::Device);
        let proof = proof.map_err(|error| format!("{}: {error}", file.display()))?;
        Ok((file, proof))
    };
    files.into_iter().map(plan).collect()
}

/// Measures on a rank, the first of which prints what was found.
pub(super) fn work(args: &Plans, folder: &Path) -> Result<ExitStatus> {
    let comm = &Communicator::from_env()?;
    let plans = proved(folder)?;
    let device = Driver::load()?.device((comm.rank() / args.ranks_per_gpu()) as u32)?;
    let context = &Context::primary(device)?;
    let ours = &CudaCollectives::builder(comm, context).staging_bytes(CudaBuilder::STAGING_BYTES).build()?;
    let mut collection = AlgorithmCollection::new(comm);
    if args.allow_other_bits {
        collection = collection.allow_other_bits();
    }
    let reductions = plans.iter().flat_map(|(_, plan)| plan.plan().reductions());
    collection.add_built_in(ours, reductions.into_iter().next().unwrap_or(ReduceOp::Sum))?;
    let mut collectives = Vec::new();
    for (_, plan) in &plans {
        collection.add(comm, context, plan, &[], CudaOptions::default())?;
        let collective = &plan.plan().collective;
        if !collectives.contains(collective) {
            collectives.push(collective.clone());
        }
    }
    for collective in &collectives {
        collection.tune(comm, ours, collective, args.dtype, args.range())?;
        if comm.rank() == 0 {
            let found = rows(&collection, collective, args.dtype, args.range());
            writeln!(stdout(), "{collective} of {}, {} ranks", args.dtype, comm.world_size())?;
            writeln!(stdout(), "{}", describe(&found))?;
        }
    }
    if comm.rank() == 0 {
        writeln!(stdout(), "kept in {}", Cache::open()?.path().display())?;
    }
    collection.free(comm)?;
    Ok(SUCCESS)
}

/// What a collection says of a message.
#[derive(Debug, Clone)]
struct Row {
    bytes: usize,
    /// Of each algorithm its name, its time, and why it does not do the call.
    each: Vec<(String, Option<Duration>, Option<String>)>,
}

fn rows(
    collection: &AlgorithmCollection,
    collective: &str,
    dtype: DType,
    sizes: RangeInclusive<usize>,
) -> Vec<Row> {
    let row = |bytes| {
        let said = collection.explain(collective, dtype, bytes).into_iter();
        Row { bytes, each: said.map(|each| (each.name.to_owned(), each.time, each.why_not)).collect() }
    };
    doubling(sizes).map(row).collect()
}

/// The times at every size, and what does the call; below them, why the others were not measured.
fn describe(rows: &[Row]) -> String {
    let Some(first) = rows.first() else { return String::new() };
    let is_measured = |place: usize| rows.iter().any(|row| row.each[place].1.is_some());
    let (measured, others): (Vec<_>, Vec<_>) = (0..first.each.len()).partition(|&place| is_measured(place));
    let titles: Vec<_> = measured.iter().map(|&place| format!("{} µs", first.each[place].0)).collect();
    let width = |title: &String| title.chars().count().max(8);
    let mut text = format!("{:>10}", "bytes");
    for title in &titles {
        text += &format!("  {title:>width$}", width = width(title));
    }
    text += "  does it\n";
    for row in rows {
        text += &format!("{:>10}", row.bytes);
        for (title, &place) in titles.iter().zip(&measured) {
            let time = row.each[place].1;
            let time = time.map_or("-".to_owned(), |time| format!("{:.2}", time.as_nanos() as f64 / 1e3));
            text += &format!("  {time:>width$}", width = width(title));
        }
        let does_it = row.each.iter().find(|(_, _, why_not)| why_not.is_none());
        text += &format!("  {}\n", does_it.map_or("-", |(name, ..)| name));
    }
    for place in others {
        let (name, _, why_not) = &first.each[place];
        text +=
            &format!("{name} was not measured: {}\n", why_not.as_deref().unwrap_or("nothing else does it"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_size_is_shown_with_its_times_and_what_does_it() {
        let row = |bytes, built_in, ring: Option<u64>| {
            let of_ring = if ring.is_some() { None } else { Some("\"built-in\" is faster".to_owned()) };
            let faster = ring.is_some().then(|| "\"ring\" is faster".to_owned());
            let other = ("max".to_owned(), None, Some("it has other results than \"built-in\"".to_owned()));
            let each = [
                ("built-in".to_owned(), Some(Duration::from_nanos(built_in)), faster),
                ("ring".to_owned(), ring.map(Duration::from_nanos), of_ring),
                other,
            ];
            Row { bytes, each: each.to_vec() }
        };
        let expected = "     bytes  built-in µs   ring µs  does it\n      \
                        1024         2.00         -  built-in\n      \
                        2048        12.50      4.56  ring\n\
                        max was not measured: it has other results than \"built-in\"\n";
        assert_eq!(describe(&[row(1024, 2000, None), row(2048, 12500, Some(4560))]), expected);
    }
}
