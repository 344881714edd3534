//! One worker's predicted blocks in the order of their use. Pure.
//!
//! A block is always more recently used than the blocks that follow it in a prompt. So the least recently used one has
//! none after it, and a worker that owns a block owns all blocks before it.

use crate::ids::BlockHash;

/// The number of a block in its LRU, until it is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slot(pub(super) u32);

impl Slot {
    /// No block: before the first, or after the last.
    pub(super) const NONE: Self = Self(u32::MAX);
}

const NONE: Slot = Slot::NONE;

#[derive(Debug)]
pub(super) struct WorkerLru {
    nodes: Vec<Node>,
    /// The first free node; the others follow by `newer`.
    free: Slot,
    oldest: Slot,
    newest: Slot,
    pub(super) len: usize,
    /// Of all blocks.
    pub(super) tokens: u64,
    /// Tokens of all prompts so far: the clock of use, which stands still while nothing is used.
    pub(super) used_tokens: u64,
    /// Second from which paths are sent to the other replicas whole once: after a restart of the worker, when all of
    /// them have forgotten its blocks.
    pub(super) resend_at_s: u32,
    /// The worker left the fleet; nothing more is recorded.
    pub(super) is_closed: bool,
}

/// When a path was used and shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Use {
    /// The second, as `PredictedIndex::seconds` counts.
    pub(super) at_s: u32,
    /// The LRU's `used_tokens`.
    pub(super) at_tokens: u64,
    /// Second in which the whole path was last sent to, or received from, another replica.
    pub(super) shared_s: u32,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Node {
    pub(super) path: BlockHash,
    parent: Slot,
    older: Slot,
    newer: Slot,
    children: u32,
    pub(super) tokens: u32,
    /// Tokens of the path up to this block.
    pub(super) end_tokens: u32,
    pub(super) used: Use,
}

impl Default for WorkerLru {
    fn default() -> Self {
        Self {
            nodes: Vec::new(),
            free: NONE,
            oldest: NONE,
            newest: NONE,
            len: 0,
            tokens: 0,
            used_tokens: 0,
            resend_at_s: 0,
            is_closed: false,
        }
    }
}

impl WorkerLru {
    pub(super) fn node(&self, slot: Slot) -> &Node {
        &self.nodes[slot.0 as usize]
    }

    fn node_mut(&mut self, slot: Slot) -> &mut Node {
        &mut self.nodes[slot.0 as usize]
    }

    /// The least recently used block, which no other one follows.
    pub(super) fn oldest(&self) -> Option<Slot> {
        (self.oldest != NONE).then_some(self.oldest)
    }

    /// The least recently used blocks beyond the limits, in the order in which they can be removed.
    pub(super) fn surplus(&self, max_tokens: u64, max_blocks: usize) -> impl Iterator<Item = Slot> {
        let mut tokens = self.tokens.saturating_sub(max_tokens);
        let mut blocks = self.len.saturating_sub(max_blocks);
        let mut next = self.oldest;
        std::iter::from_fn(move || {
            if next == NONE || tokens == 0 && blocks == 0 {
                return None;
            }
            let (slot, node) = (next, self.node(next));
            tokens = tokens.saturating_sub(node.tokens.into());
            blocks = blocks.saturating_sub(1);
            next = node.newer;
            Some(slot)
        })
    }

    /// All blocks, the most recently used first.
    pub(super) fn newest_first(&self) -> impl Iterator<Item = Slot> {
        let some = |slot: Slot| (slot != NONE).then_some(slot);
        std::iter::successors(some(self.newest), move |slot| some(self.node(*slot).older))
    }

    pub(super) fn parent(&self, slot: Slot) -> Option<Slot> {
        let parent = self.node(slot).parent;
        (parent != NONE).then_some(parent)
    }

    pub(super) fn has_children(&self, slot: Slot) -> bool {
        self.node(slot).children > 0
    }

    /// Adds a block after its parent in the prompt, a little less recently used than `before`, or the most recently
    /// used of all. The caller then has the parent used too.
    pub(super) fn insert(
        &mut self,
        path: BlockHash,
        tokens: u32,
        parent: Option<Slot>,
        before: Option<Slot>,
        used: Use,
    ) -> Slot {
        let before_tokens = parent.map_or(0, |parent| {
            let parent = self.node_mut(parent);
            parent.children += 1;
            parent.end_tokens
        });
        let node = Node {
            path,
            parent: parent.unwrap_or(NONE),
            older: NONE,
            newer: NONE,
            children: 0,
            tokens,
            end_tokens: before_tokens.saturating_add(tokens),
            used,
        };
        let slot = match self.free {
            NONE => {
                self.nodes.push(node);
                Slot(self.nodes.len() as u32 - 1)
            }
            free => {
                self.free = std::mem::replace(self.node_mut(free), node).newer;
                free
            }
        };
        self.len += 1;
        self.tokens += u64::from(tokens);
        self.link(slot, before.unwrap_or(NONE));
        slot
    }

    /// Makes a block and all before it in the prompt the most recently used ones, its prompt's first block the very
    /// last. The time of sharing never goes back.
    pub(super) fn touch_path(&mut self, end: Slot, used: Use) {
        let mut slot = end;
        while slot != NONE {
            if self.newest != slot {
                self.unlink(slot);
                self.link(slot, NONE);
            }
            let node = self.node_mut(slot);
            let shared_s = used.shared_s.max(node.used.shared_s);
            node.used = Use { shared_s, ..used };
            slot = node.parent;
        }
    }

    /// Removes a block that no other one follows.
    pub(super) fn remove(&mut self, slot: Slot) -> Node {
        self.unlink(slot);
        let node = *self.node(slot);
        debug_assert_eq!(
            node.children, 0,
            "a block was removed before those after it"
        );
        if node.parent != NONE {
            self.node_mut(node.parent).children -= 1;
        }
        self.len -= 1;
        self.tokens -= u64::from(node.tokens);
        self.node_mut(slot).newer = self.free;
        self.free = slot;
        node
    }

    /// Frees the memory of an LRU that became empty.
    pub(super) fn shrink(&mut self) {
        if self.len == 0 {
            self.nodes = Vec::new();
            self.free = NONE;
        }
    }

    /// Links a block before a more recently used one, or as the most recently used.
    fn link(&mut self, slot: Slot, newer: Slot) {
        let older = match newer {
            NONE => std::mem::replace(&mut self.newest, slot),
            newer => std::mem::replace(&mut self.node_mut(newer).older, slot),
        };
        match older {
            NONE => self.oldest = slot,
            older => self.node_mut(older).newer = slot,
        }
        let node = self.node_mut(slot);
        (node.older, node.newer) = (older, newer);
    }

    fn unlink(&mut self, slot: Slot) {
        let Node { older, newer, .. } = *self.node(slot);
        match older {
            NONE => self.oldest = newer,
            older => self.node_mut(older).newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            newer => self.node_mut(newer).older = older,
        }
    }
}
