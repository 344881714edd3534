//! A vLLM: cache groups with copies of each block, a host tier, partial blocks and resets.

use std::collections::BTreeMap;

use super::{Engine, Held};
use crate::kv::event::{EngineHash, Event, Location, Medium, Removed, Stored, Tier};

pub(super) const BLOCK: u32 = 4;
/// Prompts share starts of different lengths: number and length in tokens.
const LONGEST: u32 = 26;

/// The start of a prompt, which is what a block stands for.
pub(super) type Prefix = Vec<u32>;

#[derive(Clone)]
pub(super) struct Vllm {
    /// Groups of full attention, whose blocks must all be there; 1 if groups are not reported.
    groups: u32,
    has_host_tier: bool,
    has_partial_blocks: bool,
    has_window_group: bool,
    /// Copies of each block, by group.
    gpu: Vec<BTreeMap<Prefix, u32>>,
    /// Blocks in the host's memory, for all groups.
    host: BTreeMap<Prefix, u32>,
}

/// A prompt of some tokens; prompts begin alike.
pub(super) fn prompt(random: &mut fastrand::Rng) -> Vec<u32> {
    let fork = random.u32(..LONGEST);
    let other = random.u32(1..3);
    let length = random.u32(1..=LONGEST);
    let token = |at: u32| if at < fork { at } else { at + 100 * other };
    (0..length).map(token).collect()
}

/// A hash of a prefix, as engines make them.
pub(super) fn name(prefix: &[u32]) -> u64 {
    let step = |name: u64, token: &u32| {
        (name ^ u64::from(*token) ^ 0x5bd1)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(29)
    };
    prefix.iter().fold(11, step)
}

pub(super) fn medium(tier: Tier) -> Medium {
    match tier {
        Tier::Gpu => Medium::Gpu,
        Tier::Cpu => Medium::Cpu,
        Tier::Disk => Medium::Disk,
    }
}

/// Blocks of `size` tokens of a prompt, from token `from` on up to its length.
pub(super) fn stored(prompt: &[u32], from: usize, size: u32, tier: Tier) -> Stored {
    let size = size as usize;
    let ends = (from + size..=prompt.len()).step_by(size);
    let end = ends.clone().last().unwrap_or(from);
    Stored {
        hashes: ends.map(|end| EngineHash(name(&prompt[..end]))).collect(),
        parent: (from > 0).then(|| EngineHash(name(&prompt[..from]))),
        token_ids: prompt[from..end].to_vec(),
        block_size: size as u32,
        location: Location {
            medium: medium(tier),
            ..Location::default()
        },
        ..Stored::default()
    }
}

pub(super) fn removed(prefix: &[u32], tier: Tier) -> Removed {
    Removed {
        hashes: vec![EngineHash(name(prefix))],
        location: Location {
            medium: medium(tier),
            ..Location::default()
        },
    }
}

impl Vllm {
    fn group(&self, group: u32) -> Option<u32> {
        (self.groups > 1 || self.has_window_group).then_some(group)
    }

    fn store(&self, prompt: &[u32], from: usize, group: u32, events: &mut Vec<Event>) {
        let mut event = stored(prompt, from, BLOCK, Tier::Gpu);
        if event.hashes.is_empty() {
            return;
        }
        event.location.group = self.group(group);
        event.spec_kind = self.group(group).map(|_| "full_attention".into());
        events.push(Event::Stored(event));
    }

    /// Blocks at the start of a prompt that a request would reuse.
    fn hit(&self, prompt: &[u32]) -> usize {
        let ends = (BLOCK as usize..prompt.len()).step_by(BLOCK as usize);
        let is_cached = |end: &usize| {
            self.gpu
                .iter()
                .all(|group| group.contains_key(&prompt[..*end]))
        };
        ends.take_while(is_cached).count()
    }

    fn compute(&mut self, random: &mut fastrand::Rng, events: &mut Vec<Event>) {
        let prompt = prompt(random);
        let hit = self.hit(&prompt) * BLOCK as usize;
        for group in 0..self.groups {
            self.store(&prompt, hit, group, events);
            for end in (hit + BLOCK as usize..=prompt.len()).step_by(BLOCK as usize) {
                *self.gpu[group as usize]
                    .entry(prompt[..end].to_vec())
                    .or_default() += 1;
            }
        }
        if self.has_window_group {
            let mut event = stored(&prompt, hit, BLOCK, Tier::Gpu);
            event.location.group = Some(self.groups);
            event.spec_kind = Some("sliding_window".into());
            if !event.hashes.is_empty() {
                events.push(Event::Stored(event));
            }
        }
        let rest = prompt.len() % BLOCK as usize;
        if self.has_partial_blocks && rest > 0 {
            let mut event = stored(&prompt, prompt.len() - rest, rest as u32, Tier::Gpu);
            event.location.group = self.group(0);
            let partial = event.hashes.clone();
            events.push(Event::Stored(event));
            // Before it is full, or evicted.
            events.push(Event::Removed(Removed {
                hashes: partial,
                location: Location {
                    medium: Medium::Gpu,
                    group: self.group(0),
                    ..Location::default()
                },
            }));
        }
    }

    fn evict(&mut self, random: &mut fastrand::Rng, events: &mut Vec<Event>) {
        let group = random.u32(..self.groups);
        let blocks = &mut self.gpu[group as usize];
        if blocks.is_empty() {
            return;
        }
        let prefix = blocks
            .keys()
            .nth(random.usize(..blocks.len()))
            .unwrap()
            .clone();
        let copies = blocks.get_mut(&prefix).unwrap();
        *copies -= 1;
        if *copies == 0 {
            blocks.remove(&prefix);
        }
        let mut event = removed(&prefix, Tier::Gpu);
        event.location.group = self.group(group);
        // What moves to the host's memory is removed first.
        let is_moved = self.has_host_tier && self.groups == 1 && random.u8(..4) == 0;
        events.push(Event::Removed(event));
        if is_moved && !self.host.contains_key(&prefix) {
            self.offload(&prefix, random, events);
        }
    }

    fn offload(&mut self, prefix: &[u32], random: &mut fastrand::Rng, events: &mut Vec<Event>) {
        let mut event = stored(prefix, prefix.len() - BLOCK as usize, BLOCK, Tier::Cpu);
        if random.bool() {
            // A placeholder.
            event.parent = None;
            event.token_ids.clear();
            event.block_size = 0;
        }
        *self.host.entry(prefix.to_vec()).or_default() += 1;
        if self.groups == 1 {
            event.location.group = self.group(0);
        }
        events.push(Event::Stored(event));
    }

    fn use_host(&mut self, random: &mut fastrand::Rng, events: &mut Vec<Event>) {
        let in_all = |prefix: &&Prefix| self.gpu.iter().all(|group| group.contains_key(*prefix));
        let known: Vec<Prefix> = self.gpu[0].keys().filter(in_all).cloned().collect();
        if random.bool() && !known.is_empty() {
            let prefix = known[random.usize(..known.len())].clone();
            if !self.host.contains_key(&prefix) {
                self.offload(&prefix, random, events);
            }
        } else if !self.host.is_empty() {
            let at = random.usize(..self.host.len());
            let prefix = self.host.keys().nth(at).unwrap().clone();
            self.host.remove(&prefix);
            let mut event = removed(&prefix, Tier::Cpu);
            if self.groups == 1 {
                event.location.group = self.group(0);
            }
            events.push(Event::Removed(event));
        }
    }
}

impl Engine for Vllm {
    fn new(random: &mut fastrand::Rng) -> Self {
        let groups = [1, 1, 2, 3][random.usize(..4)];
        Self {
            groups,
            has_host_tier: random.bool(),
            has_partial_blocks: random.u8(..3) == 0,
            has_window_group: random.u8(..3) == 0,
            gpu: vec![BTreeMap::new(); groups as usize],
            host: BTreeMap::new(),
        }
    }

    fn work(&mut self, random: &mut fastrand::Rng, events: &mut Vec<Event>) {
        match random.u8(..40) {
            0..15 => self.compute(random, events),
            15..32 => self.evict(random, events),
            32..39 if self.has_host_tier => self.use_host(random, events),
            39 => {
                self.gpu.iter_mut().for_each(BTreeMap::clear);
                self.host.clear();
                events.push(Event::Cleared { ownership: None });
            }
            _ => {}
        }
    }

    fn held(&self) -> Held {
        let mut held = Held::new();
        for prefix in self.gpu[0].keys() {
            if self.gpu.iter().all(|group| group.contains_key(prefix)) {
                held.entry(name(prefix)).or_default()[Tier::Gpu as usize] = true;
            }
        }
        for prefix in self.host.keys() {
            held.entry(name(prefix)).or_default()[Tier::Cpu as usize] = true;
        }
        held
    }
}
