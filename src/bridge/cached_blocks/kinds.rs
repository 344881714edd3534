//! The kinds of the blocks that are kept, each once. A kind that no block has any more makes room for another one.

use std::collections::HashMap;

use super::block::{Kind, KindId, medium};
use crate::kv::event::Medium;

/// Kinds in use at a time. Engines with a salt for each tenant have the most.
const KINDS_MAX: usize = 4_096;

/// A table with a count of the holders of each kind. Ids stay as they are while their kinds are held.
#[derive(Debug, Default)]
pub(super) struct Kinds {
    all: Vec<Kind>,
    /// Holders of each of `all`.
    holders: Vec<usize>,
    /// Ids of kinds that nothing holds.
    free: Vec<KindId>,
    /// Kinds that something holds.
    ids: HashMap<Kind, KindId>,
}

impl Kinds {
    pub(super) fn get(&self, id: KindId) -> &Kind {
        &self.all[id as usize]
    }

    /// The kind's id, held once more. `None` if there are too many others.
    pub(super) fn hold(&mut self, kind: Kind) -> Option<KindId> {
        if let Some(id) = self.ids.get(&kind).copied() {
            self.hold_again(id);
            return Some(id);
        }
        let id = match self.free.pop() {
            Some(id) => {
                self.all[id as usize] = kind.clone();
                id
            }
            None if self.all.len() >= KINDS_MAX => return None,
            None => {
                self.all.push(kind.clone());
                self.holders.push(0);
                u32::try_from(self.all.len() - 1).expect("a few thousand")
            }
        };
        self.holders[id as usize] = 1;
        self.ids.insert(kind, id);
        Some(id)
    }

    pub(super) fn hold_again(&mut self, id: KindId) {
        self.holders[id as usize] += 1;
    }

    pub(super) fn release(&mut self, id: KindId) {
        let holders = &mut self.holders[id as usize];
        *holders -= 1;
        if *holders == 0 {
            self.ids.remove(&self.all[id as usize]);
            self.free.push(id);
        }
    }

    /// The kind of one more copy of a known block, held once more: in a lower tier, what the block was first stored as,
    /// in the copy's location.
    pub(super) fn hold_copy(&mut self, known: KindId, copy: KindId) -> Option<KindId> {
        let location = &self.get(copy).location;
        if medium(&location.medium) == &Medium::Gpu {
            self.hold_again(copy);
            return Some(copy);
        }
        let kind = Kind {
            location: location.clone(),
            ..self.get(known).clone()
        };
        self.hold(kind)
    }

    /// Kinds that something holds.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.ids.len()
    }
}
