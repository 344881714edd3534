//! A bit for the path hashes that forks may begin with, so that the table of forks is rarely asked.

const WORDS: usize = 1024;

/// The bits are made anew after so many forks were removed: until then theirs stay set.
const MAX_REMOVED: u32 = 4096;

#[derive(Debug)]
pub(super) struct ForkFilter {
    bits: Box<[u64; WORDS]>,
    removed: u32,
}

impl ForkFilter {
    pub(super) const BYTES: usize = WORDS * 8;

    pub(super) fn new() -> Self {
        Self {
            bits: Box::new([0; WORDS]),
            removed: 0,
        }
    }

    #[inline]
    pub(super) fn may_contain(&self, path: u64) -> bool {
        self.bits[(path >> 54) as usize] >> (path >> 48 & 63) & 1 == 1
    }

    pub(super) fn insert(&mut self, path: u64) {
        self.bits[(path >> 54) as usize] |= 1 << (path >> 48 & 63);
    }

    /// A fork was removed; `forks` are the ones that are left.
    pub(super) fn on_removed(&mut self, forks: impl Iterator<Item = u64>) {
        self.removed += 1;
        if self.removed > MAX_REMOVED {
            self.removed = 0;
            self.bits.fill(0);
            forks.for_each(|path| self.insert(path));
        }
    }
}
