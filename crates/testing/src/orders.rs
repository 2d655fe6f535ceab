//! Orders of calls that run, calls that are captured and launches of graphs, for the calls of any family.

use std::{cell::RefCell, error::Error, time::Duration};

use antiphon_device::cuda::{Context, Event, Graph, Stream};

type Outcome = Result<(), Box<dyn Error + Send + Sync>>;

/// Three calls, each with memory of its own.
pub struct Calls<'a> {
    /// Of the rank's GPU.
    pub context: &'a Context,
    /// Puts a call into a stream.
    pub call: &'a dyn Fn(usize, &Stream) -> Outcome,
    /// Compares what a call has left with what is right, and spoils it. The stream has been waited for.
    pub check: &'a dyn Fn(usize) -> Outcome,
    /// Makes this rank late, or its peers, by a number.
    pub be_late: &'a dyn Fn(usize),
}

fn wait_for(streams: [&Stream; 2]) -> Outcome {
    for stream in streams {
        stream.borrow().synchronize_within(Duration::from_secs(60))?;
    }
    Ok(())
}

impl Calls<'_> {
    /// Every order below. The kernels are loaded.
    pub fn in_every_order(&self) -> Outcome {
        let [a, b] = &[self.context.stream()?, self.context.stream()?];
        self.capture_between_eager_calls(a, b)?;
        self.eager_call_behind_a_captured_stream(a, b)?;
        self.fork_in_a_capture(a, b)?;
        self.replays_on_two_streams(a, b)
    }

    fn check_all(&self) -> Outcome {
        (0..3).try_for_each(self.check)
    }

    fn capture_between_eager_calls(&self, a: &Stream, b: &Stream) -> Outcome {
        (self.be_late)(0);
        (self.call)(0, a)?;
        let graph = Graph::capture(b, |_| (self.call)(1, b))?.instantiate()?;
        (self.call)(2, b)?;
        wait_for([a, b])?;
        // SAFETY: what the graph uses lives until the stream has been waited for, here and below.
        unsafe { graph.launch(a) }?;
        wait_for([a, b])?;
        self.check_all()
    }

    /// The call is refused by name, and may be made when the capture has ended.
    fn eager_call_behind_a_captured_stream(&self, a: &Stream, b: &Stream) -> Outcome {
        (self.be_late)(1);
        (self.call)(0, b)?;
        let refusal = RefCell::new(String::new());
        let graph = Graph::capture(b, |_| {
            if let Err(error) = (self.call)(2, a) {
                *refusal.borrow_mut() = error.to_string();
            }
            (self.call)(1, b)
        })?
        .instantiate()?;
        let refusal = refusal.into_inner();
        assert!(refusal.contains("the call before is being captured"), "{refusal:?}");
        (self.call)(2, a)?;
        wait_for([a, b])?;
        // SAFETY: as above.
        unsafe { graph.launch(b) }?;
        wait_for([a, b])?;
        self.check_all()
    }

    fn fork_in_a_capture(&self, a: &Stream, b: &Stream) -> Outcome {
        let [forked, joined] = [Event::new(self.context)?, Event::new(self.context)?];
        let graph = Graph::capture(a, |_| -> Outcome {
            forked.record(a)?;
            b.borrow().wait(&forked)?;
            for which in 0..3 {
                (self.call)(which, if which == 1 { b } else { a })?;
            }
            joined.record(b)?;
            Ok(a.borrow().wait(&joined)?)
        })?
        .instantiate()?;
        for replay in 0..2 {
            (self.be_late)(replay);
            // SAFETY: as above.
            unsafe { graph.launch(a) }?;
        }
        wait_for([a, b])?;
        self.check_all()
    }

    /// In an order that the program makes.
    fn replays_on_two_streams(&self, a: &Stream, b: &Stream) -> Outcome {
        let capture = |which| -> Result<_, Box<dyn Error + Send + Sync>> {
            Ok(Graph::capture(a, |_| (self.call)(which, a))?.instantiate()?)
        };
        let graphs = [capture(0)?, capture(1)?];
        let behind = Event::new(self.context)?;
        for replay in 0..3 {
            (self.be_late)(replay);
            for (graph, (stream, next)) in graphs.iter().zip([(a, b), (b, a)]) {
                // SAFETY: as above.
                unsafe { graph.launch(stream) }?;
                behind.record(stream)?;
                next.borrow().wait(&behind)?;
            }
        }
        (self.call)(2, a)?;
        wait_for([a, b])?;
        self.check_all()
    }
}
