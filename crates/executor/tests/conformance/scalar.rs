//! The obvious meaning of a plan: one element at a time, in f64, with every rank in one world. The executor is compared
//! with it; they share the plan's types, and nothing that moves data.

use std::collections::HashMap;

use antiphon_plan::*;
use antiphon_tensor::{DType, Element, with_dtype};

/// All ranks' memory.
pub struct World<'p> {
    plan: &'p Plan,
    dtype: DType,
    /// Elements of a chunk.
    chunk: usize,
    /// For each rank's input, output and scratch.
    plain: Vec<[Vec<Option<f64>>; 3]>,
    packets: Vec<Vec<Option<f64>>>,
    signals: HashMap<(Rank, ChannelType, ChannelId), i64>,
    semaphores: HashMap<(Rank, SemaphoreId), i64>,
    arrived: HashMap<(Rank, BarrierId), Vec<(u32, usize)>>,
}

/// An operation, and of a pipeline's which turn.
type Todo<'p> = (&'p OpKind, Option<(usize, &'p Pipeline)>);

impl<'p> World<'p> {
    /// What all ranks' outputs hold after the plan, as elements; None where nothing was written.
    pub fn run(plan: &'p Plan, dtype: DType, inputs: &[Vec<f64>]) -> Vec<Vec<Option<f64>>> {
        let gpu = &plan.gpus[0];
        let chunk = inputs[0].len() / gpu.input_chunks as usize;
        let larger = |gpu: &Gpu| gpu.input_chunks.max(gpu.output_chunks);
        let buffers: [&dyn Fn(&Gpu) -> u64; 3] =
            [&|gpu| gpu.input_chunks, &larger, &|gpu| gpu.scratch_chunks];
        let mut world = World {
            plan,
            dtype,
            chunk,
            plain: plan
                .gpus
                .iter()
                .map(|gpu| buffers.map(|of| vec![None; of(gpu) as usize * chunk]))
                .collect(),
            packets: plan.gpus.iter().map(|gpu| vec![None; gpu.scratch_chunks as usize * chunk]).collect(),
            signals: HashMap::new(),
            semaphores: HashMap::new(),
            arrived: HashMap::new(),
        };
        for (gpu, input) in plan.gpus.iter().zip(inputs) {
            for (at, value) in input.iter().enumerate() {
                *world.place(gpu.id, BufferType::Input, at) = Some(*value);
            }
            for (id, semaphore) in gpu.semaphores.iter().enumerate() {
                world.semaphores.insert((gpu.id, SemaphoreId(id as u32)), semaphore.init_value);
            }
        }
        world.go();
        let mut output = |gpu: &Gpu| {
            let elements = 0..gpu.output_chunks as usize * chunk;
            elements.map(|at| *world.place(gpu.id, BufferType::Output, at)).collect()
        };
        plan.gpus.iter().map(&mut output).collect()
    }

    /// Input and output are one where the plan says so, the smaller one at its rank's part of the larger one.
    fn place(&mut self, rank: Rank, buffer: BufferType, at: usize) -> &mut Option<f64> {
        let gpu = &self.plan.gpus[0];
        let part = gpu.input_chunks.min(gpu.output_chunks) as usize * self.chunk * rank.index();
        let (smaller, united) =
            (gpu.chunks(buffer) < gpu.input_chunks.max(gpu.output_chunks), self.plan.inplace);
        let (list, at) = match buffer {
            BufferType::Scratch => (2, at),
            BufferType::Input if !united => (0, at),
            BufferType::Output if !united => (1, at),
            _ => (1, if smaller { part + at } else { at }),
        };
        &mut self.plain[rank.index()][list][at]
    }

    fn go(&mut self) {
        let plan = self.plan;
        let mut blocks: Vec<(Block, Vec<Todo>, usize)> =
            Block::all(plan).map(|block| (block, self.flatten(block), 0)).collect();
        loop {
            let mut moved = false;
            for (block, todo, at) in &mut blocks {
                while *at < todo.len() && self.step(*block, todo[*at], *at) {
                    (*at, moved) = (*at + 1, true);
                }
            }
            if blocks.iter().all(|(_, todo, at)| *at == todo.len()) {
                return;
            }
            assert!(moved, "the plan is stuck");
        }
    }

    fn flatten(&self, block: Block<'p>) -> Vec<Todo<'p>> {
        let bytes = self.chunk * self.dtype.size();
        let mut todo = Vec::new();
        for op in &block.get().ops {
            let OpKind::Pipeline(pipeline) = &op.kind else {
                todo.push((&op.kind, None));
                continue;
            };
            for turn in 0..(pipeline.num_chunks as usize * bytes).div_ceil(pipeline.unit_size as usize) {
                todo.extend(pipeline.ops.iter().map(|op| (&op.kind, Some((turn, pipeline)))));
            }
        }
        todo
    }

    /// Does an operation, if it need not wait.
    fn step(&mut self, block: Block<'p>, (op, turn): Todo<'p>, at: usize) -> bool {
        let rank = block.rank();
        match op {
            OpKind::Nop | OpKind::Notify(Notify { kind: NotifyKind::Flush, .. }) => true,
            OpKind::Barrier { barrier, num_threadblocks } => {
                let arrived = self.arrived.entry((rank, *barrier)).or_default();
                if !arrived.contains(&(block.id().0, at)) {
                    arrived.push((block.id().0, at));
                }
                // Generations are as long as the barrier is wide.
                let place = arrived.iter().position(|&who| who == (block.id().0, at)).unwrap();
                arrived.len() >= (place / *num_threadblocks as usize + 1) * *num_threadblocks as usize
            }
            OpKind::Notify(notify) if notify.kind == NotifyKind::Signal => {
                notify.channels.iter().for_each(|&channel| self.signal(block, notify.channel_type, channel));
                true
            }
            OpKind::Notify(notify) => {
                let key = |index| (rank, notify.channel_type, block.channel(notify.channel_type, index));
                let there =
                    |index: &ChannelIndex| self.signals.get(&key(*index)).is_some_and(|&count| count > 0);
                let ready = notify.channels.iter().all(there);
                if ready {
                    notify
                        .channels
                        .iter()
                        .for_each(|&index| *self.signals.get_mut(&key(index)).unwrap() -= 1);
                }
                ready
            }
            OpKind::Semaphore(op) => {
                let (least, change) = if op.acquire { (1, -1) } else { (i64::MIN, 1) };
                let ready = op.semaphores.iter().all(|&id| self.semaphores[&(rank, id)] >= least);
                if ready {
                    op.semaphores
                        .iter()
                        .for_each(|&id| *self.semaphores.get_mut(&(rank, id)).unwrap() += change);
                }
                ready
            }
            OpKind::Put(put) if matches!(put.kind, PutKind::WithSignal | PutKind::WithSignalAndFlush) => {
                self.data(block, op, turn);
                put.channels.iter().for_each(|&channel| self.signal(block, put.channel_type, channel));
                true
            }
            _ => self.data(block, op, turn),
        }
    }

    fn signal(&mut self, block: Block<'p>, channel_type: ChannelType, index: ChannelIndex) {
        let peer = block.peer(channel_type, index);
        let end = Wiring::new(self.plan)
            .counterpart(block.rank(), channel_type, block.channel(channel_type, index))
            .expect("a channel has two ends");
        *self.signals.entry((peer, channel_type, end)).or_default() += 1;
    }

    /// Combines what an operation reads and writes it to where the operation writes: pair by pair for those that move
    /// several things at once, else everything into everything.
    fn data(&mut self, block: Block<'p>, op: &OpKind, turn: Option<(usize, &Pipeline)>) -> bool {
        let (mut reads, mut writes) = (Vec::new(), Vec::new());
        block.accesses(op, |access| match access.mode {
            Mode::Read => reads.push(access),
            Mode::Write => writes.push(access),
        });
        let several = matches!(op, OpKind::Get(_) | OpKind::Put(Put { kind: PutKind::Plain, .. }))
            || matches!(op, OpKind::Put(put) if put.kind != PutKind::ReadPackets);
        let jobs: Vec<(Vec<Access>, Vec<Access>)> = match several {
            true => reads.into_iter().zip(writes).map(|(read, write)| (vec![read], vec![write])).collect(),
            false => vec![(reads, writes)],
        };
        // Packets carry no turn: each turn handles all of them.
        let packets = jobs.iter().any(|(reads, writes)| reads.iter().chain(writes).any(|part| part.packets));
        let turn = turn.filter(|_| !packets);
        let reduce = match op {
            OpKind::Reduce(reduce) => reduce.op,
            OpKind::SwitchReduce(reduce) => reduce.op,
            OpKind::SwitchReduceBroadcast(reduce) => reduce.op,
            _ => ReduceOp::Sum,
        };
        let there = |read: &Access| {
            let mut elements = self.elements(read, turn).into_iter();
            !read.packets || elements.all(|at| self.packets[read.rank.index()][at].is_some())
        };
        if !jobs.iter().flat_map(|(reads, _)| reads).all(there) {
            return false;
        }
        for (reads, writes) in jobs {
            let columns: Vec<Vec<f64>> = reads.iter().map(|read| self.read(read, turn)).collect();
            for write in &writes {
                for (nth, at) in self.elements(write, turn).into_iter().enumerate() {
                    let values = columns.iter().map(|column| column[nth]);
                    let value = self.round(values.reduce(|a, b| combine(reduce, a, b)).unwrap());
                    if write.packets {
                        self.packets[write.rank.index()][at] = Some(value);
                    } else {
                        *self.place(write.rank, write.buffer, at) = Some(value);
                    }
                }
            }
        }
        true
    }

    fn read(&mut self, read: &Access, turn: Option<(usize, &Pipeline)>) -> Vec<f64> {
        let elements = self.elements(read, turn);
        let value = |at: usize| match read.packets {
            true => self.packets[read.rank.index()][at].unwrap_or(f64::NAN),
            false => self.place(read.rank, read.buffer, at).unwrap_or(f64::NAN),
        };
        elements.into_iter().map(value).collect()
    }

    /// The elements of an access, one by one: dealt out to the group in aligned units, and of the block's own those of
    /// the turn, unless they are packets.
    fn elements(&self, access: &Access, turn: Option<(usize, &Pipeline)>) -> Vec<usize> {
        let size = self.dtype.size();
        let first = access.chunks.start as usize * self.chunk;
        let count = (access.chunks.end - access.chunks.start) as usize * self.chunk;
        let mut elements: Vec<usize> = (0..count).collect();
        if let Some(GroupShare { tb_id, tbg_size }) = access.group {
            let unit = self.plan.buffer_alignment as usize / size;
            let units: Vec<Vec<usize>> = elements.chunks(unit).map(<[usize]>::to_vec).collect();
            let (each, more) = (units.len() / tbg_size as usize, units.len() % tbg_size as usize);
            let mut units = units.into_iter();
            for block in 0..=tb_id as usize {
                let mine: Vec<_> = units.by_ref().take(each + usize::from(block < more)).flatten().collect();
                elements = mine;
            }
        }
        if let Some((turn, pipeline)) = turn {
            let unit = pipeline.unit_size as usize / size;
            elements = elements.chunks(unit).nth(turn).map_or(Vec::new(), <[usize]>::to_vec);
        }
        elements.into_iter().map(|at| first + at).collect()
    }

    fn round(&self, value: f64) -> f64 {
        with_dtype!(self.dtype, T => <T as Element>::from_f64(value).to_f64())
    }
}

fn combine(op: ReduceOp, a: f64, b: f64) -> f64 {
    match op {
        ReduceOp::Sum => a + b,
        ReduceOp::Min => a.min(b),
        ReduceOp::Max => a.max(b),
        op => panic!("plans do not reduce by {op}"),
    }
}
