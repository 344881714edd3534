//! Which prefixes of a prompt are counted, and their keys. Pure.

use std::sync::Arc;

use crate::ids::BlockHash;
use crate::kv::block::{ChainRoot, LocalHash, PathHash};

/// The prefixes of a prompt that are counted: those of 1 to 15 blocks, then 8 for each doubling of the
/// length. A prompt of 8,000 blocks has 87 of them, and what two prompts share is known to an eighth.
pub type PrefixKeys = Arc<[PrefixKey]>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefixKey {
    pub path: BlockHash,
    /// Length of the prefix.
    pub blocks: u32,
}

/// The prefix keys of a prompt, given all of its full blocks.
pub fn prefix_keys(root: ChainRoot, locals: &[LocalHash]) -> PrefixKeys {
    let mut path = PathHash::start(root);
    let mut keys = Vec::with_capacity(locals.len().min(64));
    for (local, depth) in locals.iter().zip(0..) {
        path = path.step(*local, depth);
        let blocks = depth + 1;
        if is_counted(blocks) {
            let path = BlockHash(path.mixed());
            keys.push(PrefixKey { path, blocks });
        }
    }
    keys.into()
}

/// Depends on the length alone: otherwise two prompts with a common prefix would not share its keys.
fn is_counted(blocks: u32) -> bool {
    let stride = 1 << blocks.max(1).ilog2().saturating_sub(3);
    blocks.is_multiple_of(stride)
}
