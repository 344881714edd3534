//! Writes cached blocks as events, split into parts: consecutive blocks of one kind share an event.

use super::block::{Block, Kind, KindId, keys_bytes};
use super::kinds::Kinds;
use crate::kv::event::{EngineHash, Event, Location, Removed, Stored};

pub(super) struct SnapshotWriter {
    parts: Vec<Vec<Event>>,
    events: Vec<Event>,
    /// The store event that further blocks may be appended to.
    run: Option<(KindId, Stored)>,
    /// Stores of further copies of the run's blocks.
    copies: Vec<Event>,
    bytes: usize,
    bytes_max: usize,
}

impl SnapshotWriter {
    pub(super) fn new(bytes_max: usize) -> Self {
        Self {
            parts: Vec::new(),
            events: vec![Event::Cleared { ownership: None }],
            run: None,
            copies: Vec::new(),
            bytes: 0,
            bytes_max,
        }
    }

    pub(super) fn store(&mut self, hash: EngineHash, block: &Block, kind: KindId, kinds: &Kinds) {
        self.make_room(encoded_bytes(block));
        let continues = self.run.as_ref().is_some_and(|(of, run)| {
            *of == kind
                && block.parent.is_some()
                && run.hashes.last().copied() == block.parent
                && run.block_size as usize == block.tokens.len()
        });
        if !continues {
            self.flush();
        }
        let (_, run) = self
            .run
            .get_or_insert_with(|| (kind, stored(block, kinds.get(kind))));
        add(run, hash, block);
    }

    pub(super) fn copy(&mut self, hash: EngineHash, block: &Block, kind: &Kind) {
        self.make_room(encoded_bytes(block));
        let mut copy = stored(block, kind);
        add(&mut copy, hash, block);
        self.copies.push(Event::Stored(copy));
    }

    pub(super) fn remove(&mut self, hash: EngineHash, location: &Location) {
        self.make_room(16);
        match self.events.last_mut() {
            Some(Event::Removed(removed)) if removed.location == *location => {
                removed.hashes.push(hash)
            }
            _ => self.events.push(Event::Removed(Removed {
                hashes: vec![hash],
                location: location.clone(),
            })),
        }
    }

    fn make_room(&mut self, bytes: usize) {
        if self.bytes > 0 && self.bytes + bytes > self.bytes_max {
            self.flush();
            self.parts.push(std::mem::take(&mut self.events));
            self.bytes = 0;
        }
        self.bytes += bytes;
    }

    pub(super) fn flush(&mut self) {
        if let Some((_, mut run)) = self.run.take() {
            if run.extra_keys.iter().all(Vec::is_empty) {
                run.extra_keys.clear();
            }
            self.events.push(Event::Stored(run));
        }
        self.events.append(&mut self.copies);
    }

    pub(super) fn finish(mut self) -> Vec<Vec<Event>> {
        self.flush();
        if self.parts.is_empty() || !self.events.is_empty() {
            self.parts.push(self.events);
        }
        self.parts
    }
}

fn stored(block: &Block, kind: &Kind) -> Stored {
    Stored {
        hashes: Vec::new(),
        parent: block.parent,
        token_ids: Vec::new(),
        block_size: u32::try_from(block.tokens.len()).expect("it came in 32 bits"),
        lora_id: kind.lora_id,
        lora_name: kind.lora_name.clone(),
        cache_salt: kind.cache_salt.clone(),
        extra_keys: Vec::new(),
        location: kind.location.clone(),
        spec_kind: kind.spec_kind.clone(),
        sliding_window: kind.sliding_window,
        session_id: None,
    }
}

fn add(run: &mut Stored, hash: EngineHash, block: &Block) {
    run.hashes.push(hash);
    run.token_ids.extend_from_slice(&block.tokens);
    run.extra_keys.push(block.extra_keys.to_vec());
}

/// Upper bound of a block's size in a message; a token takes up to five bytes.
fn encoded_bytes(block: &Block) -> usize {
    48 + 5 * block.tokens.len() + keys_bytes(&block.extra_keys)
}
