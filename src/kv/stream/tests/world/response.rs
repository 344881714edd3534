//! How the engine answers a replay request.

use std::collections::BTreeSet;

use super::{Payload, Process, SourceEvent, World};
use crate::kv::source::SnapshotChunk;
use crate::kv::stream::*;

impl World {
    /// Whoever is alive now answers, which need not be whom the connection is to.
    pub(super) fn response(&mut self) {
        let alive = self.alive();
        let spoils = self.hits(self.make.spoilt);
        let how = self.random.u8(..5);
        let make = self.make;
        let is_deaf = make.is_deaf || self.in_deaf_spell;
        let Some(line) = &mut self.connection else {
            return;
        };
        let Some(first) = line.request.take() else {
            return;
        };
        let process = &self.processes[alive];
        if is_deaf && !make.is_one_stream {
            return;
        }
        let oldest = process.count().saturating_sub(make.kept);
        if make.is_one_stream {
            self.log.push(format!("stream of {alive} from {first}"));
            line.live.clear();
            line.process = alive;
            line.is_dead = false;
            line.is_open = true;
            line.awaits_first = false;
            if first == 0 && make.has_snapshots && process.count() > 0 {
                for (place, chunk) in snapshot(process, alive).into_iter().enumerate() {
                    if place == 0 {
                        line.live.push_back(SourceEvent::Replayed(chunk));
                        line.live.push_back(SourceEvent::End);
                    } else {
                        line.live.push_back(SourceEvent::Live(chunk));
                    }
                }
            } else if first == 0 {
                line.awaits_first = true;
            } else if is_deaf || first < oldest || first > process.count() || spoils {
                line.is_open = false;
                line.live.push_back(SourceEvent::Failed);
            } else {
                let mut frames = process.frames[first as usize..].iter().cloned();
                match frames.next() {
                    Some(frame) => {
                        line.live.push_back(SourceEvent::Replayed(frame));
                        line.live.push_back(SourceEvent::End);
                        line.live.extend(frames.map(SourceEvent::Live));
                    }
                    None => line.awaits_first = true,
                }
            }
            return;
        }
        let mut said: Vec<SourceEvent> = process.frames
            [(first.max(oldest).min(process.count())) as usize..]
            .iter()
            .cloned()
            .map(SourceEvent::Replayed)
            .collect();
        match make.answer_max {
            Some(max) if said.len() > max => {
                // What did not fit into the socket's queue, or some of it, and the end.
                let until = [said.len(), max + 2][usize::from(how % 2)].min(said.len());
                said.drain(max..until);
            }
            Some(_) | None => said.push(SourceEvent::End),
        }
        if spoils && !said.is_empty() {
            let place = self.random.usize(..said.len());
            match how {
                0 => said.truncate(place),
                1 => {
                    said.truncate(place);
                    said.push(SourceEvent::End);
                }
                2 => {
                    said.truncate(place);
                    said.push(SourceEvent::Failed);
                }
                3 if said.len() > 2 => {
                    said.remove(place.min(said.len() - 2));
                }
                _ => said.clear(),
            }
        }
        line.answers.extend(said);
        self.log.push(format!("{alive} answers from {first}"));
    }
}

/// Two chunks that end at the number of the newest batch, where there is room for two numbers.
fn snapshot(process: &Process, number: usize) -> Vec<SourceBatch<Payload>> {
    let newest = process.count() - 1;
    let held: Vec<u8> = process.held_after(newest).iter().copied().collect();
    let count = if newest > 0 { 2 } else { 1 };
    let parts = [&held[..held.len() / 2], &held[held.len() / 2..]];
    (0..count)
        .map(|index| {
            let stored = if count == 1 { &held[..] } else { parts[index] };
            SourceBatch {
                sequence: newest + 1 + index as u64 - count as u64,
                digest: u128::MAX - index as u128,
                bytes: 10,
                snapshot: Some(SnapshotChunk {
                    index: index as u32,
                    count: count as u32,
                    unknown_before: 0,
                }),
                batch: Ok(Payload {
                    process: number,
                    index: newest,
                    clears: false,
                    stored: stored.iter().copied().collect(),
                    removed: BTreeSet::new(),
                }),
            }
        })
        .collect()
}
