//! Readers beside a writer: pages, sets and trees' numbers are reused under them all the time, and no
//! reader may be told of a block that the worker never held.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use super::*;

/// Every worker only ever holds its own part of a prompt, however its trees come and go.
fn holds_at_most(prompt: usize, worker: WorkerId) -> u32 {
    match (worker.0 as usize + prompt) % 4 {
        0 => 0,
        1 => 5,
        2 => 17,
        _ => LENGTH as u32,
    }
}

/// Where a prompt begins: prompts that share a start, or, where one page's holders taken for another's
/// shall show, prompts that share nothing.
fn start(prompt: usize, is_apart: bool) -> Root {
    match is_apart {
        true => Root(100 + prompt as u64),
        false => root_of(prompt),
    }
}

/// Not a proof: it sees a roster that lacks its "was there when the roll was called", but neither a
/// page's version nor a set's generation that is not looked at again. Those [`super::overtaken`] sees,
/// within seconds.
#[test]
fn readers_never_see_what_a_worker_never_held() {
    for (trees, is_apart) in [(2, true), (5, false), (6, true), (70, false)] {
        let (_forest, index) = index_of(64 << 20);
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let readers: Vec<_> = (0..2)
                .map(|reader| {
                    scope.spawn({
                        let (index, is_over) = (index.clone(), &is_over);
                        move || read(&index, is_over, reader, is_apart)
                    })
                })
                .collect();
            write(&index, trees, is_apart);
            is_over.store(true, Relaxed);
            for reader in readers {
                assert!(reader.join().unwrap() > 0, "a reader saw nothing at all");
            }
        });
    }
}

fn read(index: &Index, is_over: &AtomicBool, reader: usize, is_apart: bool) -> u64 {
    let prompts: Vec<Vec<Local>> = (0..PROMPTS.len()).map(locals_of).collect();
    let mut found = Vec::new();
    let mut seen = 0;
    while !is_over.load(Relaxed) {
        for (prompt, locals) in prompts.iter().enumerate().skip(reader) {
            found.clear();
            index.overlap(start(prompt, is_apart), locals, &mut found);
            for depth in &found {
                // Prompts share their starts, so what is held of one is held of others.
                let most = (0..PROMPTS.len())
                    .map(|other| {
                        shared(prompt, other, is_apart).min(holds_at_most(other, depth.worker))
                    })
                    .max();
                assert!(
                    Some(depth.blocks) <= most
                        && depth.gpu_blocks + depth.disk_blocks <= depth.blocks,
                    "prompt {prompt}: {depth:?}, never more than {most:?}"
                );
                assert_eq!(depth.rank, depth.worker.0 % 2);
                seen += 1;
            }
        }
    }
    seen
}

/// Blocks at the start of two prompts that are the same.
fn shared(a: usize, b: usize, is_apart: bool) -> u32 {
    if start(a, is_apart) != start(b, is_apart) {
        return 0;
    }
    let both = locals_of(a).into_iter().zip(locals_of(b));
    both.take_while(|(a, b)| a == b).count() as u32
}

fn write(index: &Arc<Index>, trees: usize, is_apart: bool) {
    let mut random = fastrand::Rng::with_seed(7);
    let mut both = Both::new(index.clone(), trees);
    for _ in 0..60_000 {
        let at = random.usize(..trees);
        let prompt = random.usize(..PROMPTS.len());
        let (tree, _, worker) = &mut both.trees[at];
        let most = holds_at_most(prompt, *worker) as usize;
        let named = |name: Name| Name(name.0 ^ start(prompt, is_apart).0 << 32);
        let run = Run {
            tree: at,
            prompt,
            from: 0,
            len: random.usize(..=most),
            naming: if random.bool() {
                Naming::Common
            } else {
                Naming::Private
            },
            tier: if random.u8(..8) == 0 {
                Tier::Cpu
            } else {
                Tier::Gpu
            },
        };
        match random.u8(..100) {
            0..50 => {
                let mut blocks = run.blocks();
                blocks
                    .iter_mut()
                    .for_each(|block| block.name = named(block.name));
                let after = After::Root(start(prompt, is_apart));
                let _ = tree.store(after, &blocks, run.tier, Copies::Unknown);
            }
            50..90 => {
                let mut names = run.names();
                names.reverse();
                names.iter_mut().for_each(|name| *name = named(*name));
                tree.remove(&names, run.tier);
            }
            90..96 => tree.clear(),
            _ => both.take(&Step::Replant(at)),
        }
    }
}
