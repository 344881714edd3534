//! A lookup during which the writer changes the index, in one thread: at each race point of the lookup,
//! one after the other. What it reports of a worker that did not change is exact; of the others, every
//! block was there before or after.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use super::*;
use crate::kv::index::race_point::AT_RACE_POINT;
use crate::kv::index::tests::model::Count;

/// Every worker's blocks at one moment.
type Moment = Vec<(WorkerId, Model)>;

fn moment(both: &Modelled) -> Moment {
    let trees = both.trees.iter();
    trees
        .map(|(_, model, worker)| (*worker, model.clone()))
        .collect()
}

/// Whether a worker had a prompt's block at one of the moments, in one tier or in any.
fn had(
    moments: &[Moment],
    worker: WorkerId,
    prompt: usize,
    blocks: usize,
    tier: Option<Tier>,
) -> bool {
    let mut content = vec![root_of(prompt).0];
    content.extend((0..blocks).map(|at| local_at(prompt, at).0));
    moments.iter().flatten().any(|(other, model)| {
        let block = model
            .blocks
            .get(content.as_slice())
            .filter(|_| *other == worker);
        block.is_some_and(|block| {
            tier.is_none_or(|tier| block.copies[tier as usize] != Count::Known(0))
        })
    })
}

fn both_of(trees: usize) -> (Arc<PrefixIndexes>, Rc<RefCell<Modelled>>) {
    let (indexes, index) = index_of(64 << 20);
    (indexes, Rc::new(RefCell::new(Modelled::new(index, trees))))
}

/// Runs `meanwhile` at the given race point of one lookup. False if the lookup has fewer.
fn interleave(
    at: usize,
    both: &Rc<RefCell<Modelled>>,
    before: &[Step],
    meanwhile: &[Step],
    prompt: usize,
    blocks: usize,
) -> bool {
    let (index, first) = {
        let mut both = both.borrow_mut();
        (0..both.trees.len()).for_each(|tree| both.take(&Step::Replace(tree)));
        before.iter().for_each(|step| both.take(step));
        (both.index.clone(), moment(&both))
    };
    let passed = Rc::new(Cell::new(0));
    AT_RACE_POINT.set(Some(Box::new({
        let (both, passed, meanwhile) = (both.clone(), passed.clone(), meanwhile.to_vec());
        move || {
            if passed.replace(passed.get() + 1) == at {
                let mut both = both.borrow_mut();
                meanwhile.iter().for_each(|step| both.take(step));
            }
        }
    })));
    let mut found = Vec::new();
    let locals = locals_of(prompt);
    index.overlap(root_of(prompt), &locals[..blocks], &mut found);
    AT_RACE_POINT.set(None);
    let is_over = passed.get() <= at;
    let moments = [first, moment(&both.borrow())];
    for depth in &found {
        let of_worker = moments.iter().flatten();
        let is_of_one_moment =
            of_worker
                .filter(|(worker, _)| *worker == depth.worker)
                .any(|(_, model)| {
                    let (blocks, gpu_blocks, _) = model.depth(root_of(prompt), &locals[..blocks]);
                    depth.blocks <= blocks && depth.gpu_blocks <= gpu_blocks
                });
        if is_of_one_moment {
            continue;
        }
        for block in 1..=depth.blocks as usize {
            assert!(
                had(&moments, depth.worker, prompt, block, None),
                "at {at}, never had {block} blocks: {depth:?}"
            );
        }
        for block in 1..=depth.gpu_blocks as usize {
            assert!(
                had(&moments, depth.worker, prompt, block, Some(Tier::Gpu)),
                "at {at}, never had {block} blocks in the GPU: {depth:?}"
            );
        }
    }
    for (tree, (worker, model)) in moments[0].iter().enumerate() {
        let is_touched = meanwhile.iter().any(|step| match step {
            Step::Store(run, _)
            | Step::StoreLower(run, _, _)
            | Step::CountToRemove(run)
            | Step::Remove(run, _) => run.tree == tree,
            Step::Clear(other) | Step::Replace(other) => *other == tree,
        });
        if is_touched {
            continue;
        }
        let (blocks, gpu_blocks, disk_blocks) = model.depth(root_of(prompt), &locals[..blocks]);
        let expected = RankPrefix {
            worker: *worker,
            rank: worker.0 % 2,
            blocks,
            gpu_blocks,
            disk_blocks,
        };
        let of_worker: Vec<RankPrefix> = found
            .iter()
            .filter(|depth| depth.worker == *worker)
            .copied()
            .collect();
        assert_eq!(
            of_worker,
            if blocks > 0 { vec![expected] } else { vec![] },
            "at {at}, it did not change"
        );
    }
    !is_over
}

fn interleaved(trees: usize) -> impl Strategy<Value = (Vec<Step>, Vec<Step>, usize, usize)> {
    (
        proptest::collection::vec(step(trees), 1..25),
        proptest::collection::vec(step(trees), 1..8),
        0..PROMPTS.len(),
        prop_oneof![Just(LENGTH), 1..=LENGTH],
    )
}

/// A run of one prompt's blocks.
fn of(tree: usize, prompt: usize, blocks: std::ops::Range<usize>) -> Run {
    Run {
        tree,
        prompt,
        from: blocks.start,
        len: blocks.len(),
        naming: EngineNames::Common,
        tier: Tier::Gpu,
    }
}

fn store(tree: usize, prompt: usize, blocks: std::ops::Range<usize>) -> Step {
    Step::Store(of(tree, prompt, blocks), CopyReport::AtLeastOne)
}

fn remove(tree: usize, prompt: usize, blocks: std::ops::Range<usize>) -> Step {
    Step::Remove(of(tree, prompt, blocks), true)
}

/// All interleavings of three steps by which pages pass from one prompt to another, get shorter and get
/// other owners: random steps do this too seldom.
#[test]
fn a_lookup_interleaved_with_any_three_steps_reports_what_was_there() {
    const P: usize = 0;
    const OTHER: usize = 6;
    let befores = [
        vec![store(0, P, 0..32), store(1, P, 0..16)],
        vec![store(0, P, 0..64), store(1, P, 0..64)],
        vec![store(0, P, 0..32), store(1, P, 0..24)],
        vec![store(0, P, 0..20), store(1, P, 0..16)],
        vec![
            store(0, P, 0..32),
            store(0, OTHER, 0..16),
            store(1, OTHER, 0..16),
        ],
    ];
    let steps = [
        store(0, P, 0..32),
        store(1, P, 0..32),
        store(2, P, 0..32),
        store(0, OTHER, 0..16),
        store(1, OTHER, 0..16),
        remove(0, P, 0..32),
        remove(0, P, 16..32),
        remove(0, P, 20..32),
        remove(1, P, 0..32),
    ];
    let (_indexes, both) = both_of(3);
    for before in &befores {
        for number in 0..steps.len().pow(3) {
            let chosen = [0, 1, 2].map(|place| number / steps.len().pow(place) % steps.len());
            if chosen[0] == chosen[1] || chosen[1] == chosen[2] {
                continue;
            }
            let meanwhile = chosen.map(|step| steps[step].clone());
            let mut at = 0;
            while interleave(at, &both, before, &meanwhile, P, 64) {
                at += 1;
            }
            assert!(at > 3, "only {at} race points");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn an_interleaved_lookup_reports_what_was_there(
        (before, meanwhile, prompt, blocks) in interleaved(4),
    ) {
        let (_indexes, both) = both_of(4);
        let mut at = 0;
        while interleave(at, &both, &before, &meanwhile, prompt, blocks) {
            at += 1;
        }
    }
}
