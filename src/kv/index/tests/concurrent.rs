//! Lookups on threads beside the writer's: pages and slots are reused under them all the time, and no lookup may report
//! a block that the worker never had.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use super::*;

/// Every worker only ever has its own part of a prompt, however often its tree is replaced.
fn holds_at_most(prompt: usize, worker: WorkerId) -> u32 {
    match (worker.0 as usize + prompt) % 4 {
        0 => 0,
        1 => 5,
        2 => 17,
        _ => LENGTH as u32,
    }
}

/// The root of a prompt. With `is_apart`, prompts share nothing, so that one page's owners taken for
/// another page's show up.
fn start(prompt: usize, is_apart: bool) -> ChainRoot {
    if is_apart {
        ChainRoot(100 + prompt as u64)
    } else {
        root_of(prompt)
    }
}

#[test]
fn lookups_never_report_blocks_that_a_worker_never_had() {
    for (trees, is_apart) in [(2, true), (5, false), (6, true), (70, false)] {
        let (_indexes, index) = index_of(64 << 20);
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
                assert!(reader.join().unwrap() > 0, "a reader found nothing at all");
            }
        });
    }
}

#[test]
fn a_lookup_sees_all_blocks_of_an_event_or_none() {
    const BLOCKS: usize = 40;
    let (_indexes, index) = index_of(64 << 20);
    let run = Run {
        tree: 0,
        prompt: 0,
        from: 0,
        len: BLOCKS,
        naming: EngineNames::Common,
        tier: Tier::Gpu,
    };
    let mut tree = index.add_tree(WorkerId(1), 0);
    tree.set_visible(true);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let locals = locals_of(0);
            let mut found = Vec::new();
            let mut seen = [0; 2];
            while seen.contains(&0) || seen[0] + seen[1] < 10_000 {
                found.clear();
                index.overlap(root_of(0), &locals, &mut found);
                let blocks = found.first().map_or(0, |prefix| prefix.blocks as usize);
                assert!(blocks == 0 || blocks == BLOCKS, "{blocks} blocks");
                seen[usize::from(blocks > 0)] += 1;
            }
        });
        while !reader.is_finished() {
            tree.store(run.after(), &run.blocks(), Tier::Gpu, CopyReport::OneMore)
                .unwrap();
            assert_eq!(tree.remove(&run.names(), Tier::Gpu), 0);
        }
        reader.join().unwrap();
    });
}

fn read(index: &PrefixIndex, is_over: &AtomicBool, reader: usize, is_apart: bool) -> u64 {
    let prompts: Vec<Vec<LocalHash>> = (0..PROMPTS.len()).map(locals_of).collect();
    let mut found = Vec::new();
    let mut seen = 0;
    while !is_over.load(Relaxed) {
        for (prompt, locals) in prompts.iter().enumerate().skip(reader) {
            found.clear();
            index.overlap(start(prompt, is_apart), locals, &mut found);
            for depth in &found {
                // Prompts share prefixes, so a prefix of one may be a prefix of others.
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

/// Length of the common prefix of two prompts.
fn shared(a: usize, b: usize, is_apart: bool) -> u32 {
    if start(a, is_apart) != start(b, is_apart) {
        return 0;
    }
    let both = locals_of(a).into_iter().zip(locals_of(b));
    both.take_while(|(a, b)| a == b).count() as u32
}

fn write(index: &Arc<PrefixIndex>, trees: usize, is_apart: bool) {
    let mut random = fastrand::Rng::with_seed(7);
    let mut both = Modelled::new(index.clone(), trees);
    for _ in 0..60_000 {
        let at = random.usize(..trees);
        let prompt = random.usize(..PROMPTS.len());
        let (tree, _, worker) = &mut both.trees[at];
        let most = holds_at_most(prompt, *worker) as usize;
        let named = |name: EngineHash| EngineHash(name.0 ^ start(prompt, is_apart).0 << 32);
        let run = Run {
            tree: at,
            prompt,
            from: 0,
            len: random.usize(..=most),
            naming: if random.bool() {
                EngineNames::Common
            } else {
                EngineNames::Private
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
                let after = Parent::Root(start(prompt, is_apart));
                let _ = tree.store(after, &blocks, run.tier, CopyReport::AtLeastOne);
            }
            50..90 => {
                let mut names = run.names();
                names.reverse();
                names.iter_mut().for_each(|name| *name = named(*name));
                tree.remove(&names, run.tier);
            }
            90..96 => tree.clear(),
            _ => both.take(&Step::Replace(at)),
        }
    }
}
