//! Held blocks written down as events, in parts, with as few events as they fit in.

use super::{Block, Kind, KindId, keys_bytes};
use crate::kv::event::{Event, Name, Place, Removed, Stored};

/// The list as it is written.
pub(super) struct List {
    parts: Vec<Vec<Event>>,
    events: Vec<Event>,
    /// A store that further blocks may be added to.
    run: Option<(KindId, Stored)>,
    /// Further copies of the run's blocks.
    copies: Vec<Event>,
    bytes: usize,
    bytes_max: usize,
}

impl List {
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

    pub(super) fn store(&mut self, name: Name, block: &Block, kind: KindId, kinds: &[Kind]) {
        self.make_room(encoded_bytes(block));
        let continues = self.run.as_ref().is_some_and(|(of, run)| {
            *of == kind
                && block.parent.is_some()
                && run.names.last().copied() == block.parent
                && run.block_size as usize == block.tokens.len()
        });
        if !continues {
            self.flush();
        }
        let (_, run) = self
            .run
            .get_or_insert_with(|| (kind, stored(block, &kinds[kind as usize])));
        add(run, name, block);
    }

    pub(super) fn copy(&mut self, name: Name, block: &Block, kind: &Kind) {
        self.make_room(encoded_bytes(block));
        let mut copy = stored(block, kind);
        add(&mut copy, name, block);
        self.copies.push(Event::Stored(copy));
    }

    pub(super) fn remove(&mut self, name: Name, place: &Place) {
        self.make_room(16);
        match self.events.last_mut() {
            Some(Event::Removed(removed)) if removed.place == *place => removed.names.push(name),
            _ => self.events.push(Event::Removed(Removed {
                names: vec![name],
                place: place.clone(),
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

    pub(super) fn done(mut self) -> Vec<Vec<Event>> {
        self.flush();
        if self.parts.is_empty() || !self.events.is_empty() {
            self.parts.push(self.events);
        }
        self.parts
    }
}

fn stored(block: &Block, kind: &Kind) -> Stored {
    Stored {
        names: Vec::new(),
        parent: block.parent,
        token_ids: Vec::new(),
        block_size: u32::try_from(block.tokens.len()).expect("it came in 32 bits"),
        lora_id: kind.lora_id,
        lora_name: kind.lora_name.clone(),
        cache_salt: kind.cache_salt.clone(),
        extra_keys: Vec::new(),
        place: kind.place.clone(),
        spec_kind: kind.spec_kind.clone(),
        sliding_window: kind.sliding_window,
        session_id: None,
    }
}

fn add(run: &mut Stored, name: Name, block: &Block) {
    run.names.push(name);
    run.token_ids.extend_from_slice(&block.tokens);
    run.extra_keys.push(block.extra_keys.to_vec());
}

/// Bytes of a block in a message, and a little more: a token takes up to five.
fn encoded_bytes(block: &Block) -> usize {
    48 + 5 * block.tokens.len() + keys_bytes(&block.extra_keys)
}
