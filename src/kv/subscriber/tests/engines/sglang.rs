//! An SGLang: pages of one size, each at most once in a tier, in a radix tree that loses its leaves first; HiCache keeps
//! copies in the host's memory and loads them back, all of it in one batch if need be.

use std::collections::BTreeSet;

use super::vllm::{Prefix, medium, name, removed};
use super::{Engine, Held};
use crate::kv::event::{EngineHash, Event, Location, Stored, Tier};
use crate::kv::page_fold::BLOCK_TOKENS;

#[derive(Clone)]
pub(super) struct Sglang {
    page: usize,
    has_host_tier: bool,
    /// Pages in the GPU and in the host's memory, by the prefix that ends with them. With a page its parents are there.
    tiers: [BTreeSet<Prefix>; 2],
}

const TIERS: [Tier; 2] = [Tier::Gpu, Tier::Cpu];

impl Sglang {
    fn prompt(&self, random: &mut fastrand::Rng) -> Prefix {
        let longest = (self.page * 5).max(70);
        let fork = random.usize(..longest);
        let other = random.u32(1..3);
        let length = random.usize(1..=longest);
        let token = |at: usize| at as u32 + if at < fork { 0 } else { 1_000 * other };
        (0..length).map(token).collect()
    }

    /// Stores the pages that a tier lacks, in one event or in several as nodes of the radix tree have them.
    fn store(
        &mut self,
        at: usize,
        prompt: &[u32],
        random: &mut fastrand::Rng,
        events: &mut Vec<Event>,
    ) {
        let ends = (self.page..=prompt.len()).step_by(self.page);
        let mut node: Option<Stored> = None;
        for end in ends {
            if !self.tiers[at].insert(prompt[..end].to_vec()) {
                continue;
            }
            let start = end - self.page;
            let begins = node.is_none() || random.u8(..6) == 0;
            if begins && let Some(node) = node.take() {
                events.push(Event::Stored(node));
            }
            let node = node.get_or_insert_with(|| Stored {
                parent: (start > 0).then(|| EngineHash(name(&prompt[..start]))),
                block_size: self.page as u32,
                location: Location {
                    medium: medium(TIERS[at]),
                    ..Location::default()
                },
                ..Stored::default()
            });
            node.hashes.push(EngineHash(name(&prompt[..end])));
            node.token_ids.extend(&prompt[start..end]);
        }
        events.extend(node.map(Event::Stored));
    }

    /// Removes the pages of one leaf of a tier, from a random page on.
    fn evict(&mut self, at: usize, random: &mut fastrand::Rng, events: &mut Vec<Event>) {
        let pages = &self.tiers[at];
        if pages.is_empty() {
            return;
        }
        let first = pages
            .iter()
            .nth(random.usize(..pages.len()))
            .unwrap()
            .clone();
        let below: Vec<Prefix> = pages
            .iter()
            .filter(|prefix| prefix.starts_with(&first))
            .cloned()
            .collect();
        // What the host's memory has of it stays only where its parents are there, too.
        let mut event = removed(&first, TIERS[at]);
        let mut deepest_first = below;
        deepest_first.sort_by_key(|prefix| std::cmp::Reverse(prefix.len()));
        event.hashes = deepest_first
            .iter()
            .map(|prefix| EngineHash(name(prefix)))
            .collect();
        for prefix in &deepest_first {
            self.tiers[at].remove(prefix);
        }
        events.push(Event::Removed(event));
    }
}

impl Engine for Sglang {
    const CACHES_PAGES: bool = true;

    fn new(random: &mut fastrand::Rng) -> Self {
        Self {
            page: [1, 1, 2, 4, 8, 16, 64][random.usize(..7)],
            has_host_tier: random.bool(),
            tiers: [BTreeSet::new(), BTreeSet::new()],
        }
    }

    fn work(&mut self, random: &mut fastrand::Rng, events: &mut Vec<Event>) {
        match random.u8(..40) {
            0..14 => {
                let prompt = self.prompt(random);
                self.store(0, &prompt, random, events);
            }
            14..24 => self.evict(0, random, events),
            24..30 if self.has_host_tier => {
                // Backed up while it is in the GPU.
                let gpu = &self.tiers[0];
                if !gpu.is_empty() {
                    let prefix = gpu.iter().nth(random.usize(..gpu.len())).unwrap().clone();
                    self.store(1, &prefix, random, events);
                }
            }
            30..33 if self.has_host_tier => self.evict(1, random, events),
            33..39 if self.has_host_tier => {
                // Loaded back.
                let host = &self.tiers[1];
                if !host.is_empty() {
                    let prefix = host.iter().nth(random.usize(..host.len())).unwrap().clone();
                    self.store(0, &prefix, random, events);
                }
            }
            39 => {
                self.tiers = Default::default();
                events.push(Event::Cleared { ownership: None });
            }
            _ => {}
        }
    }

    fn held(&self) -> Held {
        let block = self.page.max(BLOCK_TOKENS as usize);
        let mut held = Held::new();
        for (at, pages) in self.tiers.iter().enumerate() {
            for prefix in pages
                .iter()
                .filter(|prefix| prefix.len().is_multiple_of(block))
            {
                held.entry(name(prefix)).or_default()[at] = true;
            }
        }
        held
    }
}
