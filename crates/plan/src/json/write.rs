//! Writing a plan as JSON. It is written by hand, because plans of many ranks are tens of megabytes, and a serializer of structures
//! would need a second set of types for the keys that only some operations have.

use std::fmt::Write;

use itoa::Buffer;

use crate::op::{
    BufferType, ChannelType, Copy, Get, GroupShare, LocalChunk, Notify, Op, OpKind, Pipeline, Put, RankChunk,
    Reduce, RemoteChunk, SemaphoreOp, SwitchBroadcast, SwitchChunk, SwitchReduce, SwitchReduceBroadcast,
};
use crate::plan::{Gpu, GpuChannels, Plan, Protocol, ThreadBlock};

/// The plan as text.
pub(super) fn plan(plan: &Plan) -> String {
    let mut to = Writer { text: String::with_capacity(estimate(plan)), depth: 0, first: true };
    to.object(|to| {
        to.key("name");
        match &plan.name {
            Some(name) => to.string(name),
            None => to.raw("null"),
        }
        to.text("collective", &plan.collective);
        to.text("protocol", if plan.protocol == Protocol::LL { "LL" } else { "Simple" });
        to.bool("inplace", plan.inplace);
        to.bool("reuse_resources", plan.reuse_resources);
        to.list("gpus", &plan.gpus, gpu);
        to.number("num_threads_per_block", plan.num_threads_per_block);
        to.bool("use_double_scratch_buffer", plan.use_double_scratch_buffer);
        to.number("buffer_alignment", plan.buffer_alignment);
        to.number("min_message_size", plan.min_message_size);
        to.number("max_message_size", plan.max_message_size);
    });
    to.text
}

/// About as many bytes as there will be, or more: a plan of many ranks is copied often otherwise, while it grows.
fn estimate(plan: &Plan) -> usize {
    const OP: usize = 512;
    let blocks = || plan.gpus.iter().flat_map(|gpu| &gpu.threadblocks);
    let ops: usize = blocks().map(|block| 1 + block.ops.len()).sum();
    (1 + plan.gpus.len() + ops) * OP
}

fn gpu(to: &mut Writer, gpu: &Gpu) {
    to.object(|to| {
        to.number("id", gpu.id.0);
        to.number("input_chunks", gpu.input_chunks);
        to.number("output_chunks", gpu.output_chunks);
        to.number("scratch_chunks", gpu.scratch_chunks);
        to.list("threadblocks", &gpu.threadblocks, threadblock);
        to.list("channels", &gpu.channels, channels);
        to.list("remote_buffers", &gpu.remote_buffers, |to, remote| {
            to.object(|to| {
                to.number("rank", remote.rank.0);
                to.word("type", buffer(remote.buffer));
                to.list("access_channel_types", &remote.access_channel_types, |to, of| {
                    to.string(channel_type(*of))
                });
            })
        });
        to.list("semaphores", &gpu.semaphores, |to, semaphore| {
            to.object(|to| to.number("init_value", semaphore.init_value));
        });
    });
}

fn channels(to: &mut Writer, channels: &GpuChannels) {
    to.object(|to| match channels {
        GpuChannels::Peers { channel_type: of, connected_to } => {
            to.word("channel_type", channel_type(*of));
            to.numbers("connected_to", connected_to.iter().map(|rank| rank.0));
        }
        GpuChannels::Switch { buffer: of, rank_groups } => {
            to.word("channel_type", channel_type(ChannelType::Switch));
            to.word("buffer_type", buffer(*of));
            to.list("rank_groups", rank_groups, |to, ranks| {
                to.object(|to| {
                    to.number("size", ranks.len());
                    to.numbers("ranks", ranks.iter().map(|rank| rank.0));
                });
            });
        }
    });
}

fn threadblock(to: &mut Writer, block: &ThreadBlock) {
    to.object(|to| {
        to.number("id", block.id);
        to.list("ops", &block.ops, op);
        to.list("channels", &block.channels, |to, refs| {
            to.object(|to| {
                to.word("channel_type", channel_type(refs.channel_type));
                to.numbers("channel_ids", refs.channel_ids.iter().map(|id| id.0));
            });
        });
        to.list("remote_buffer_refs", &block.remote_buffer_refs, |to, refs| {
            to.object(|to| {
                to.word("access_channel_type", channel_type(refs.access_channel_type));
                to.numbers("remote_buffer_ids", refs.remote_buffer_ids.iter().map(|id| id.0));
            });
        });
    });
}

fn op(to: &mut Writer, op: &Op) {
    to.object(|to| {
        to.text("name", op.kind.name());
        match &op.kind {
            OpKind::Nop => {}
            OpKind::Barrier { barrier, num_threadblocks } => {
                to.number("barrier_id", barrier.0);
                to.number("num_threadblocks", *num_threadblocks);
            }
            OpKind::Notify(Notify { channels, channel_type: of, .. }) => {
                to.numbers("channel_ids", channels.iter().map(|id| id.0));
                to.word("channel_type", channel_type(*of));
            }
            OpKind::Semaphore(SemaphoreOp { semaphores, .. }) => {
                to.numbers("semaphore_ids", semaphores.iter().map(|id| id.0));
            }
            OpKind::Copy(Copy { src, dst, group, .. }) => {
                to.list("src_buff", std::slice::from_ref(src), local);
                to.list("dst_buff", std::slice::from_ref(dst), local);
                to.group(*group);
            }
            OpKind::Put(Put { src, dst, channels, channel_type: of, group, .. }) => {
                to.list("src_buff", src, local);
                to.list("dst_buff", dst, remote);
                if *of == ChannelType::Port {
                    to.numbers("channel_ids", channels.iter().map(|id| id.0));
                }
                to.word("channel_type", channel_type(*of));
                to.group(*group);
            }
            OpKind::Get(Get { src, dst, channels, channel_type: of, group }) => {
                to.list("src_buff", src, remote);
                to.list("dst_buff", dst, local);
                to.numbers("channel_ids", channels.iter().map(|id| id.0));
                to.word("channel_type", channel_type(*of));
                to.group(*group);
            }
            OpKind::Reduce(reduce) => reduction(to, reduce),
            OpKind::SwitchReduce(SwitchReduce { buffer: of, offset, size, dst, channels, op }) => {
                to.word("buffer_type", buffer(*of));
                to.number("buffer_offset", *offset);
                to.number("size", *size);
                to.key("dst_chunk");
                of_rank(to, dst);
                to.numbers("channel_ids", channels.iter().map(|id| id.0));
                to.word("channel_type", channel_type(ChannelType::Switch));
                to.word("reduce_op", op.name());
            }
            OpKind::SwitchBroadcast(SwitchBroadcast { src, dst, .. }) => {
                to.list("src_buff", std::slice::from_ref(src), of_rank);
                to.list("dst_buff", std::slice::from_ref(dst), switch);
                to.word("channel_type", channel_type(ChannelType::Switch));
            }
            OpKind::SwitchReduceBroadcast(SwitchReduceBroadcast { src, dst, op }) => {
                to.list("src_buff", std::slice::from_ref(src), switch);
                to.list("dst_buff", std::slice::from_ref(dst), switch);
                to.word("channel_type", channel_type(ChannelType::Switch));
                to.word("reduce_op", op.name());
            }
            OpKind::Pipeline(Pipeline { unit_size, num_chunks, ops }) => {
                to.key("iter_context");
                to.object(|to| {
                    to.number("unit_size", *unit_size);
                    to.number("num_chunks", *num_chunks);
                });
                to.list("ops", ops, self::op);
            }
        }
    });
}

fn reduction(to: &mut Writer, reduce: &Reduce) {
    to.key("src_buff");
    to.array(|to| {
        reduce.src.iter().for_each(|chunk| to.item(chunk, local));
        reduce.remote_src.iter().for_each(|chunk| to.item(chunk, remote));
    });
    to.key("dst_buff");
    to.array(|to| {
        to.item(&reduce.dst, local);
        reduce.packet_dst.iter().for_each(|chunk| to.item(chunk, local));
        reduce.remote_dst.iter().for_each(|chunk| to.item(chunk, remote));
    });
    if let Some(of) = reduce.channel_type {
        to.word("channel_type", channel_type(of));
    }
    to.word("reduce_op", reduce.op.name());
    to.group(reduce.group);
}

fn local(to: &mut Writer, chunk: &LocalChunk) {
    to.object(|to| {
        to.word("type", buffer(chunk.buffer));
        to.number("index", chunk.index);
        to.number("size", chunk.size);
    });
}

fn remote(to: &mut Writer, chunk: &RemoteChunk) {
    to.object(|to| {
        to.number("buffer_id", chunk.buffer_id.0);
        to.number("index", chunk.index);
        to.number("size", chunk.size);
    });
}

fn switch(to: &mut Writer, chunk: &SwitchChunk) {
    to.object(|to| {
        to.number("switch_channel_id", chunk.switch_channel_id.0);
        to.number("index", chunk.index);
        to.number("size", chunk.size);
    });
}

fn of_rank(to: &mut Writer, chunk: &RankChunk) {
    to.object(|to| {
        to.number("rank", chunk.rank.0);
        to.word("type", buffer(chunk.buffer));
        to.number("index", chunk.index);
        to.number("size", chunk.size);
    });
}

fn buffer(buffer: BufferType) -> &'static str {
    match buffer {
        BufferType::Input => "i",
        BufferType::Output => "o",
        BufferType::Scratch => "s",
    }
}

fn channel_type(of: ChannelType) -> &'static str {
    match of {
        ChannelType::Memory => "memory",
        ChannelType::Port => "port",
        ChannelType::Switch => "switch",
    }
}

/// Indented text.
struct Writer {
    text: String,
    depth: usize,
    /// Whether nothing stands yet in the innermost list or object.
    first: bool,
}

impl Writer {
    fn raw(&mut self, text: &str) {
        self.text.push_str(text);
    }

    fn string(&mut self, text: &str) {
        self.text.push('"');
        for unit in text.chars() {
            match unit {
                '"' => self.raw("\\\""),
                '\\' => self.raw("\\\\"),
                '\n' => self.raw("\\n"),
                '\r' => self.raw("\\r"),
                '\t' => self.raw("\\t"),
                '\u{8}' => self.raw("\\b"),
                '\u{c}' => self.raw("\\f"),
                ' '..='~' => self.text.push(unit),
                // As Python's json does: ASCII only.
                _ => {
                    for half in unit.encode_utf16(&mut [0; 2]) {
                        write!(self.text, "\\u{half:04x}").expect("a String takes all");
                    }
                }
            }
        }
        self.text.push('"');
    }

    /// A new line in the list or object that is open.
    fn next(&mut self) {
        const LINE: &str = ",\n                                ";
        self.text.push_str(&LINE[usize::from(self.first)..2 + 2 * self.depth]);
        self.first = false;
    }

    fn nested(&mut self, open: char, close: char, body: impl FnOnce(&mut Self)) {
        self.text.push(open);
        self.depth += 1;
        self.first = true;
        body(self);
        self.depth -= 1;
        if !self.first {
            self.first = true;
            self.next();
        }
        self.text.push(close);
        self.first = false;
    }

    fn object(&mut self, body: impl FnOnce(&mut Self)) {
        self.nested('{', '}', body);
    }

    fn array(&mut self, body: impl FnOnce(&mut Self)) {
        self.nested('[', ']', body);
    }

    fn item<T>(&mut self, item: &T, write: impl FnOnce(&mut Self, &T)) {
        self.next();
        write(self, item);
    }

    fn key(&mut self, key: &str) {
        self.next();
        self.text.push('"');
        self.raw(key);
        self.raw("\": ");
    }

    /// A string without anything to escape.
    fn word(&mut self, key: &str, value: &'static str) {
        self.key(key);
        self.text.push('"');
        self.raw(value);
        self.text.push('"');
    }

    fn text(&mut self, key: &str, value: &str) {
        self.key(key);
        self.string(value);
    }

    fn bool(&mut self, key: &str, value: bool) {
        self.key(key);
        self.raw(if value { "true" } else { "false" });
    }

    fn number(&mut self, key: &str, value: impl itoa::Integer) {
        self.key(key);
        self.raw(Buffer::new().format(value));
    }

    fn numbers(&mut self, key: &str, values: impl Iterator<Item = u32>) {
        self.key(key);
        self.array(|to| {
            for value in values {
                to.next();
                to.raw(Buffer::new().format(value));
            }
        });
    }

    fn list<T>(&mut self, key: &str, items: &[T], write: impl Fn(&mut Self, &T)) {
        self.key(key);
        self.array(|to| items.iter().for_each(|item| to.item(item, &write)));
    }

    fn group(&mut self, group: Option<GroupShare>) {
        if let Some(GroupShare { tb_id, tbg_size }) = group {
            self.key("tbg_info");
            self.object(|to| {
                to.number("tb_id", tb_id);
                to.number("tbg_size", tbg_size);
            });
        }
    }
}
