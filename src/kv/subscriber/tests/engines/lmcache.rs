//! A vLLM with a store beside it that reports chunks of its own: other sizes, other names, with removals or without.

use std::collections::BTreeSet;

use super::vllm::{BLOCK, Prefix, Vllm, medium, name, prompt};
use super::{Engine, Held};
use crate::kv::event::{EngineHash, Event, Location, Removed, Stored, Tier};

#[derive(Clone)]
pub(super) struct WithStore {
    engine: Vllm,
    chunk: usize,
    tier: Tier,
    /// The store names its medium `cpu`, in small letters, and not as an engine names `tier`.
    is_small_letters: bool,
    removes: bool,
    chunks: BTreeSet<Prefix>,
}

/// The store's own name of a chunk.
fn name_of_chunk(prefix: &[u32]) -> u64 {
    name(prefix) ^ 0x00ff_00ff_00ff_00ff
}

impl WithStore {
    fn location(&self) -> Location {
        let medium = if self.is_small_letters {
            crate::kv::event::Medium::named("cpu")
        } else {
            medium(self.tier)
        };
        Location {
            medium,
            ..Location::default()
        }
    }

    fn tier(&self) -> usize {
        if self.is_small_letters {
            Tier::Cpu as usize
        } else {
            self.tier as usize
        }
    }
}

impl Engine for WithStore {
    fn new(random: &mut fastrand::Rng) -> Self {
        Self {
            engine: Vllm::new(random),
            chunk: [1, 2, 3, 6][random.usize(..4)] * BLOCK as usize,
            tier: [Tier::Cpu, Tier::Disk][random.usize(..2)],
            is_small_letters: random.bool(),
            removes: random.bool(),
            chunks: BTreeSet::new(),
        }
    }

    fn work(&mut self, random: &mut fastrand::Rng, events: &mut Vec<Event>) {
        match random.u8(..10) {
            0..3 => {
                let prompt = prompt(random);
                for end in (self.chunk..=prompt.len()).step_by(self.chunk) {
                    let start = end - self.chunk;
                    if !self.chunks.insert(prompt[..end].to_vec()) {
                        continue;
                    }
                    let parent = (start > 0).then(|| EngineHash(name_of_chunk(&prompt[..start])));
                    events.push(Event::Stored(Stored {
                        hashes: vec![EngineHash(name_of_chunk(&prompt[..end]))],
                        parent,
                        token_ids: prompt[start..end].to_vec(),
                        block_size: self.chunk as u32,
                        location: self.location(),
                        ..Stored::default()
                    }));
                }
            }
            3 if !self.chunks.is_empty() => {
                let at = random.usize(..self.chunks.len());
                let prefix = self.chunks.iter().nth(at).unwrap().clone();
                self.chunks.remove(&prefix);
                if self.removes {
                    events.push(Event::Removed(Removed {
                        hashes: vec![EngineHash(name_of_chunk(&prefix))],
                        location: self.location(),
                    }));
                }
            }
            _ => {
                let before = events.len();
                self.engine.work(random, events);
                let mut new = events[before..].iter();
                if new.any(|event| matches!(event, Event::Cleared { .. })) {
                    // What is stored beside the engine is not known any more.
                    self.chunks.clear();
                }
            }
        }
    }

    fn held(&self) -> Held {
        let mut held = self.engine.held();
        for prefix in &self.chunks {
            held.entry(name_of_chunk(prefix)).or_default()[self.tier()] = true;
        }
        held
    }

    fn knows_lower_tiers(&self) -> bool {
        false
    }

    fn is_never_removed(&self, _: u64, tier: usize) -> bool {
        !self.removes && tier != Tier::Gpu as usize
    }
}
