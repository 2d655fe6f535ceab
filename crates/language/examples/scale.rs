//! How long a direct all-to-all takes from the first call to its JSON: `cargo run --release -p antiphon-language --example
//! scale`. The program is the one of benches/language_scale.py.

use std::time::Instant;

use antiphon_language::{Collective, DataSync, Options, Program, Result};

fn all_to_all(ranks: u32, instances: u32) -> Result<Program> {
    let options = Options { instances, ..Options::default() };
    let program = Program::new("all_to_all", &Collective::all_to_all(ranks, 1), options);
    for own in 0..ranks {
        let rank = program.rank(own)?;
        let (input, output, part) = (rank.input(), rank.output(), u64::from(own));
        rank.copy(output.chunk(part)?, input.chunk(part)?, 0)?;
        for step in 1..ranks {
            let (peer, tb) = ((own + step) % ranks, step - 1);
            let channel = program.memory_channel(peer, own)?;
            channel.put(program.rank(peer)?.output().chunk(part)?, input.chunk(peer.into())?, tb)?;
            channel.signal(tb, DataSync::BOTH)?;
            channel.wait(tb, DataSync::BOTH)?;
        }
    }
    Ok(program)
}

fn main() -> Result<()> {
    println!("ranks x instances | build ms | passes ms | JSON ms | all ms | bytes (the fastest of 9)");
    for (ranks, instances) in [(8, 1), (16, 4), (64, 1), (64, 4)] {
        let runs = (0..9).map(|_| {
            let start = Instant::now();
            let program = all_to_all(ranks, instances)?;
            let built = start.elapsed();
            let plan = program.plan()?;
            let planned = start.elapsed();
            let text = plan.to_json();
            Ok((start.elapsed(), built, planned, text.len()))
        });
        let runs = runs.collect::<Result<Vec<_>>>()?;
        let &(all, built, planned, bytes) = runs.iter().min().expect("there are nine");
        let ms = |time: std::time::Duration| time.as_secs_f64() * 1e3;
        let (passes, json) = (ms(planned - built), ms(all - planned));
        println!(
            "{ranks} x {instances} | {:.2} | {passes:.2} | {json:.2} | {:.2} | {bytes}",
            ms(built),
            ms(all)
        );
    }
    Ok(())
}
