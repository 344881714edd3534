//! One stream that a test plays to, and what came of it.

use std::time::{Duration, Instant};

use crate::kv::source::SnapshotChunk;
use crate::kv::stream::*;

/// What a batch carries: whose it is, and its number.
pub(super) type Payload = (u64, u64);

pub(super) struct Play {
    pub(super) stream: EventStream<Payload>,
    pub(super) now: Instant,
    /// What was applied since all was forgotten.
    pub(super) applied: Vec<Payload>,
    pub(super) asked: Vec<u64>,
    pub(super) resets: Vec<ResyncReason>,
    pub(super) tree_requests: u32,
    pub(super) trees_taken: u32,
}

pub(super) const PEER_TREE_TIMEOUT: Duration = Duration::from_secs(10);

/// A whole tree of a process, up to a batch.
pub(super) fn tree(process: u64, sequence: u64) -> PeerTree {
    PeerTree {
        sequence,
        digest: frame(process, sequence).digest,
        is_complete: true,
        incarnation: None,
    }
}

pub(super) fn frame(process: u64, sequence: u64) -> SourceBatch<Payload> {
    SourceBatch {
        sequence,
        digest: u128::from(process) << 64 | u128::from(sequence),
        bytes: 10,
        snapshot: None,
        batch: Ok((process, sequence)),
    }
}

pub(super) fn chunk(
    sequence: u64,
    index: u32,
    count: u32,
    unknown_before: u64,
) -> SourceBatch<Payload> {
    SourceBatch {
        snapshot: Some(SnapshotChunk {
            index,
            count,
            unknown_before,
        }),
        digest: 99,
        ..frame(0, sequence)
    }
}

impl Play {
    pub(super) fn new() -> Self {
        let now = crate::observe::now();
        Self {
            stream: EventStream::new(Settings::default(), now),
            now,
            applied: Vec::new(),
            asked: Vec::new(),
            resets: Vec::new(),
            tree_requests: 0,
            trees_taken: 0,
        }
    }

    /// One that has other replicas to ask.
    pub(super) fn with_peers() -> Self {
        let mut play = Self::new();
        play.stream =
            EventStream::new(Settings::default(), play.now).with_peer_trees(PEER_TREE_TIMEOUT);
        play
    }

    pub(super) fn tree(&mut self, tree: &PeerTree) -> Result<(), PeerTreeRefusal> {
        let steps = self.stream.on_peer_tree(self.now, tree)?;
        self.took(steps);
        Ok(())
    }

    pub(super) fn no_tree(&mut self) {
        let steps = self.stream.on_no_peer_tree(self.now);
        self.took(steps);
    }

    /// One that has joined process 0 at its first batch and followed it up to `last`.
    pub(super) fn live(last: u64) -> Self {
        let mut play = Self::new();
        play.connect(None);
        play.response(0, 0..=last);
        assert_eq!(play.state(), "live");
        play.asked.clear();
        play
    }

    pub(super) fn took(&mut self, steps: Steps<Payload>) {
        for step in steps {
            match step {
                Step::Apply { payload, .. } => self.applied.push(payload),
                Step::Clear(reason) => {
                    self.applied.clear();
                    self.resets.push(reason);
                }
                Step::RequestReplay { first } => self.asked.push(first),
                Step::RequestPeerTree => self.tree_requests += 1,
                Step::TakePeerTree => {
                    self.applied.clear();
                    self.trees_taken += 1;
                }
            }
        }
    }

    pub(super) fn connect(&mut self, incarnation: Option<&str>) {
        let steps = self.stream.on_connected(self.now, incarnation, true);
        self.took(steps);
    }

    pub(super) fn connect_deaf(&mut self) {
        let steps = self.stream.on_connected(self.now, None, false);
        self.took(steps);
    }

    pub(super) fn lose(&mut self) {
        let steps = self.stream.on_disconnected(self.now);
        self.took(steps);
    }

    pub(super) fn restart_signal(&mut self) {
        let steps = self.stream.on_restart_signal(self.now);
        self.took(steps);
    }

    pub(super) fn live_frame(&mut self, frame: SourceBatch<Payload>) {
        let steps = self.stream.on_live(self.now, frame);
        self.took(steps);
    }

    pub(super) fn say(&mut self, process: u64, sequences: impl IntoIterator<Item = u64>) {
        for sequence in sequences {
            self.live_frame(frame(process, sequence));
        }
    }

    pub(super) fn replay(&mut self, frame: SourceBatch<Payload>) {
        let steps = self.stream.on_replayed(self.now, frame);
        self.took(steps);
    }

    pub(super) fn end(&mut self) {
        let steps = self.stream.on_replay_end(self.now);
        self.took(steps);
    }

    pub(super) fn fail(&mut self) {
        let steps = self.stream.on_replay_failed(self.now);
        self.took(steps);
    }

    pub(super) fn response(&mut self, process: u64, sequences: impl IntoIterator<Item = u64>) {
        for sequence in sequences {
            self.replay(frame(process, sequence));
        }
        self.end();
    }

    pub(super) fn wait(&mut self) {
        self.now = self.stream.next_timeout().expect("it waits for something");
        let steps = self.stream.on_timeout(self.now);
        self.took(steps);
    }

    pub(super) fn state(&self) -> &'static str {
        self.stream.state().as_str()
    }

    pub(super) fn numbers(&self) -> Vec<u64> {
        self.applied.iter().map(|(_, sequence)| *sequence).collect()
    }
}
