use super::*;
use crate::kv::event::{ExtraKey, Medium};

fn stored(change: impl FnOnce(&mut Stored)) -> Event {
    let mut stored = Stored {
        hashes: vec![EngineHash(1), EngineHash(2)],
        token_ids: vec![1, 2, 3, 4],
        block_size: 2,
        ..Stored::default()
    };
    change(&mut stored);
    Event::Stored(stored)
}

fn removed(change: impl FnOnce(&mut Location)) -> Event {
    let mut location = Location::default();
    change(&mut location);
    Event::Removed(Removed {
        hashes: vec![EngineHash(1)],
        location,
    })
}

fn text(text: &str) -> ExtraKey {
    ExtraKey::Text(text.into())
}

/// What comes of the last of `events`: a root or parent and the local hashes, or why not.
fn check(events: &[Event]) -> Result<(Parent, Vec<u64>), Ignored> {
    let mut filter = EventFilter::default();
    let (last, before) = events.split_last().unwrap();
    for event in before {
        // As a tree that has every parent.
        if let Ok(TreeChange::Store {
            blocks,
            tier,
            shape,
            ..
        }) = filter.accept(event)
        {
            let blocks = blocks.len();
            filter.on_placed(shape, tier, blocks);
        }
    }
    match filter.accept(last)? {
        TreeChange::Store { after, blocks, .. } => {
            Ok((after, blocks.iter().map(|block| block.local.0).collect()))
        }
        other => panic!("{other:?}"),
    }
}

fn why(events: &[Event]) -> (IgnoredReason, TreeImpact) {
    let left = check(events).unwrap_err();
    (left.reason, left.impact)
}

fn plain() -> Vec<u64> {
    vec![block::hash_block(&[1, 2]).0, block::hash_block(&[3, 4]).0]
}

#[test]
fn a_prompt_begins_at_the_root_of_its_adapter_and_salt() {
    let root = |lora, salt| Parent::Root(block::chain_root(lora, salt));
    let none = stored(|_| {});
    assert_eq!(check(&[none]), Ok((root(None, None), plain())));
    let lora = stored(|stored| {
        stored.lora_name = Some("sql".into());
        stored.lora_id = Some(1);
        stored.extra_keys = vec![vec![text("sql")], vec![text("sql")]];
    });
    assert_eq!(check(&[lora]), Ok((root(Some("sql"), None), plain())));
    let salt = stored(|stored| stored.extra_keys = vec![vec![text("t")], vec![]]);
    assert_eq!(check(&[salt]), Ok((root(None, Some("t")), plain())));
    let field = stored(|stored| {
        stored.cache_salt = Some("t".into());
        stored.extra_keys = vec![vec![text("t")], vec![]];
    });
    assert_eq!(check(&[field]), Ok((root(None, Some("t")), plain())));
    let same = stored(|stored| {
        stored.lora_name = Some("t".into());
        stored.extra_keys = vec![vec![text("t"), text("t")], vec![text("t")]];
    });
    assert_eq!(check(&[same]), Ok((root(Some("t"), Some("t")), plain())));
}

#[test]
fn a_continued_prompt_follows_its_parent_and_a_text_there_is_no_salt() {
    let next = stored(|stored| stored.parent = Some(EngineHash(9)));
    assert_eq!(check(&[next]), Ok((Parent::Block(EngineHash(9)), plain())));
    let odd = stored(|stored| {
        stored.parent = Some(EngineHash(9));
        stored.extra_keys = vec![vec![text("t")], vec![]];
    });
    let (after, locals) = check(&[odd]).unwrap();
    assert_eq!(after, Parent::Block(EngineHash(9)));
    assert_ne!(locals[0], plain()[0]);
    assert_eq!(locals[1], plain()[1]);
}

#[test]
fn images_and_embeddings_are_part_of_their_block_alone() {
    let with = |key: ExtraKey| {
        let (after, locals) =
            check(&[stored(|stored| stored.extra_keys = vec![vec![], vec![key]])]).unwrap();
        assert_eq!(after, Parent::Root(block::chain_root(None, None)));
        assert_eq!(locals[0], plain()[0]);
        locals[1]
    };
    let image = |offset| ExtraKey::Multimodal {
        identifier: "cat".into(),
        offset,
    };
    let all = [
        plain()[1],
        with(image(0)),
        with(image(-3)),
        with(ExtraKey::Blob(b"cat".as_slice().into())),
        with(ExtraKey::Number(3)),
        with(text("cat")),
    ];
    let distinct: FxHashSet<u64> = all.into_iter().collect();
    assert_eq!(distinct.len(), all.len());
    assert_eq!(with(image(0)), with(image(0)));
}

#[test]
fn only_groups_that_tell_what_can_be_reused_are_kept() {
    let of = |group: u32, kind: &str| {
        let kind = Some(kind.into());
        stored(|stored| {
            stored.location.group = Some(group);
            stored.spec_kind = kind;
        })
    };
    for kind in ["full_attention", "mla_attention", "sink_full_attention"] {
        assert!(check(&[of(3, kind)]).is_ok(), "{kind}");
    }
    for kind in [
        "sliding_window",
        "sliding_window_mla",
        "mamba",
        "chunked_local_attention",
        "cross_attention",
        "encoder_only_attention",
    ] {
        assert_eq!(
            why(&[of(3, kind)]),
            (IgnoredReason::NonPrefixAttention, TreeImpact::None)
        );
        assert_eq!(
            why(&[of(0, kind)]),
            (IgnoredReason::NonPrefixAttention, TreeImpact::None)
        );
    }
    let unknown = (IgnoredReason::UnknownAttention, TreeImpact::Incomplete);
    assert_eq!(why(&[of(0, "holographic")]), unknown);
    let unknown_kind = stored(|stored| stored.location.group = Some(3));
    let unlearnt = (IgnoredReason::UnknownGroup, TreeImpact::Incomplete);
    assert_eq!(why(std::slice::from_ref(&unknown_kind)), unlearnt);
    assert!(check(&[of(3, "full_attention"), unknown_kind]).is_ok());
    let changed = (IgnoredReason::GroupChanged, TreeImpact::Unknown);
    assert_eq!(why(&[of(3, "full_attention"), of(3, "mamba")]), changed);
    assert_eq!(why(&[stored(|_| {}), of(0, "mamba")]), changed);
}

#[test]
fn what_is_not_understood_is_left_out() {
    let cases: [(&str, Event, IgnoredReason, TreeImpact); 10] = [
        (
            "medium",
            stored(|s| s.location.medium = Medium::Other("HBM".into())),
            IgnoredReason::UnknownMedium,
            TreeImpact::None,
        ),
        (
            "remote_memory",
            stored(|s| s.location.locality = Some("REMOTE".into())),
            IgnoredReason::RemoteMemory,
            TreeImpact::None,
        ),
        (
            "locality",
            stored(|s| s.location.locality = Some("ORBIT".into())),
            IgnoredReason::UnknownLocality,
            TreeImpact::Incomplete,
        ),
        (
            "separate_owner",
            stored(|s| s.location.ownership = Some("pool".into())),
            IgnoredReason::SeparateOwner,
            TreeImpact::None,
        ),
        (
            "block size",
            stored(|s| s.block_size = 0),
            IgnoredReason::NoBlockSize,
            TreeImpact::Incomplete,
        ),
        (
            "tokens",
            stored(|s| s.token_ids.truncate(3)),
            IgnoredReason::InconsistentFields,
            TreeImpact::Incomplete,
        ),
        (
            "keys",
            stored(|s| s.extra_keys = vec![vec![]]),
            IgnoredReason::InconsistentFields,
            TreeImpact::Incomplete,
        ),
        (
            "adapter",
            stored(|s| s.lora_id = Some(1)),
            IgnoredReason::UnnamedLora,
            TreeImpact::Incomplete,
        ),
        (
            "event",
            Event::Unknown {
                kind: "x".into(),
                hashes: None,
            },
            IgnoredReason::UnknownEvent,
            TreeImpact::Unknown,
        ),
        (
            "event that names nothing",
            Event::Unknown {
                kind: "x".into(),
                hashes: Some(vec![]),
            },
            IgnoredReason::UnknownEvent,
            TreeImpact::None,
        ),
    ];
    for (name, event, filtered, impact) in cases {
        assert_eq!(why(&[event]), (filtered, impact), "{name}");
    }
    let other = stored(|s| {
        s.block_size = 4;
        s.hashes.truncate(1);
    });
    let changed = (IgnoredReason::BlockSizeChanged, TreeImpact::Incomplete);
    assert_eq!(why(&[stored(|_| {}), other.clone()]), changed);
    assert!(check(&[other]).is_ok());
}

/// Two blocks, and the tokens after each.
fn with_lookahead(first: &[u32], second: &[u32]) -> Event {
    let keys = [first, second].map(|tokens| vec![ExtraKey::Lookahead(tokens.into())]);
    stored(|stored| stored.extra_keys = keys.into())
}

#[test]
fn the_tokens_after_a_block_are_part_of_it() {
    let (_, found) = check(&[with_lookahead(&[3], &[5])]).unwrap();
    let expected = [[1, 2, 3], [3, 4, 5]].map(|tokens| block::hash_block(&tokens).0);
    assert_eq!(found, expected);
    let image = |keys: &mut Vec<ExtraKey>| keys.push(ExtraKey::Number(3));
    let mut with_image = with_lookahead(&[3], &[5]);
    if let Event::Stored(stored) = &mut with_image {
        stored.extra_keys.iter_mut().for_each(image);
    }
    let (_, other) = check(&[with_image]).unwrap();
    assert!(other.iter().all(|local| !expected.contains(local)));
}

#[test]
fn a_process_does_not_change_how_many_tokens_after_a_block_count() {
    let inconsistent = (IgnoredReason::InconsistentFields, TreeImpact::Incomplete);
    assert_eq!(why(&[with_lookahead(&[3], &[5, 6])]), inconsistent);
    assert_eq!(why(&[with_lookahead(&[3], &[])]), inconsistent);
    let changed = (IgnoredReason::LookaheadChanged, TreeImpact::Incomplete);
    let one = || with_lookahead(&[3], &[5]);
    let two = with_lookahead(&[3, 4], &[5, 6]);
    assert_eq!(why(&[one(), two]), changed);
    assert_eq!(why(&[one(), stored(|_| {})]), changed);
    assert_eq!(why(&[stored(|_| {}), one()]), changed);
}

fn partial(hash: u64) -> Event {
    stored(|stored| {
        stored.hashes = vec![EngineHash(hash)];
        stored.token_ids = vec![1];
        stored.block_size = 1;
    })
}

#[test]
fn the_partial_block_of_a_short_prompt_does_not_set_the_block_size() {
    let (_, locals) = check(&[partial(9), stored(|_| {})]).unwrap();
    assert_eq!(locals, plain());
    let one_block = stored(|stored| {
        stored.hashes.truncate(1);
        stored.token_ids.truncate(2);
    });
    assert!(check(&[partial(9), partial(8), one_block.clone()]).is_ok());
    let larger = stored(|stored| {
        stored.block_size = 4;
        stored.hashes.truncate(1);
    });
    assert!(check(&[partial(9), one_block, larger]).is_ok());
}

#[test]
fn a_partial_block_is_ignored_and_leaves_the_tree_whole() {
    let ignored = (IgnoredReason::PartialBlock, TreeImpact::None);
    assert_eq!(why(&[stored(|_| {}), partial(9)]), ignored);
    let two = stored(|stored| stored.block_size = 1);
    assert_eq!(
        why(&[stored(|_| {}), two]),
        (IgnoredReason::BlockSizeChanged, TreeImpact::Incomplete)
    );
}

#[test]
fn a_store_that_the_tree_does_not_place_does_not_set_the_block_size() {
    let mut filter = EventFilter::default();
    let orphan = stored(|stored| {
        stored.parent = Some(EngineHash(7));
        stored.block_size = 4;
        stored.hashes.truncate(1);
    });
    // Its parent is unknown, so `on_placed` is not called.
    assert!(filter.accept(&orphan).is_ok());
    assert!(filter.accept(&stored(|_| {})).is_ok());
}

#[test]
fn a_copy_in_a_lower_tier_counts_by_its_name_where_its_content_is_not_certain() {
    let in_cpu = |change: fn(&mut Stored)| {
        stored(|stored| {
            stored.location.medium = Medium::Cpu;
            change(stored);
        })
    };
    let names = [EngineHash(1), EngineHash(2)];
    let by_name = TreeChange::AddCopies {
        hashes: &names,
        tier: Tier::Cpu,
    };
    let of = |events: &[Event]| {
        let mut filter = EventFilter::default();
        let (last, before) = events.split_last().unwrap();
        for event in before {
            let _ = filter.accept(event);
        }
        format!("{:?}", filter.accept(last).unwrap())
    };
    let by_name = format!("{by_name:?}");
    let placeholder = in_cpu(|stored| {
        stored.block_size = 0;
        stored.token_ids.clear();
    });
    assert_eq!(of(&[placeholder]), by_name);
    assert_eq!(of(&[in_cpu(|stored| stored.token_ids.clear())]), by_name);
    let plain_copy = in_cpu(|_| {});
    assert_ne!(of(&[stored(|_| {}), plain_copy.clone()]), by_name);
    let salted = stored(|stored| stored.extra_keys = vec![vec![text("t")], vec![]]);
    assert_eq!(of(&[salted.clone(), plain_copy]), by_name);
    let with_keys = in_cpu(|stored| stored.extra_keys = vec![vec![text("t")], vec![]]);
    assert_ne!(of(&[salted, with_keys]), by_name);
}

#[test]
fn an_event_of_a_later_type_takes_what_it_names_and_nothing_else() {
    let mut filter = EventFilter::default();
    let event = Event::Unknown {
        kind: "BlockMoved".into(),
        hashes: Some(vec![EngineHash(1)]),
    };
    assert_eq!(
        filter.accept(&event),
        Ok(TreeChange::Forget {
            hashes: &[EngineHash(1)],
            reason: IgnoredReason::UnknownEvent
        })
    );
}

#[test]
fn a_removal_touches_only_what_its_store_could_have_put_there() {
    let hashes = [EngineHash(1)];
    let mut filter = EventFilter::default();
    let gpu = TreeChange::Remove {
        hashes: &hashes,
        tier: Tier::Gpu,
    };
    assert_eq!(filter.accept(&removed(|_| {})), Ok(gpu.clone()));
    let local = removed(|location| location.locality = Some("LOCAL".into()));
    assert_eq!(filter.accept(&local), Ok(gpu));
    let others = [
        (
            removed(|location| location.group = Some(1)),
            IgnoredReason::UnknownGroup,
        ),
        (
            removed(|location| location.locality = Some("REMOTE".into())),
            IgnoredReason::RemoteMemory,
        ),
        (
            removed(|location| location.ownership = Some("pool".into())),
            IgnoredReason::SeparateOwner,
        ),
    ];
    for (event, why) in others {
        assert_eq!(filter.accept(&event), Err(no_impact(why)));
    }
    let window = stored(|stored| {
        stored.location.group = Some(1);
        stored.spec_kind = Some("sliding_window".into());
    });
    let _ = filter.accept(&window);
    let other = removed(|location| location.group = Some(1));
    assert_eq!(
        filter.accept(&other),
        Err(no_impact(IgnoredReason::NonPrefixAttention))
    );
}

#[test]
fn a_removal_from_an_unknown_medium_is_of_what_was_stored_there_or_of_everything() {
    let hashes = [EngineHash(1)];
    let other = |location: &mut Location| location.medium = Medium::Other("HBM".into());
    let mut filter = EventFilter::default();
    assert_eq!(
        filter.accept(&removed(other)),
        Ok(TreeChange::Forget {
            hashes: &hashes,
            reason: IgnoredReason::UnknownMedium
        })
    );
    let _ = filter.accept(&stored(|stored| other(&mut stored.location)));
    assert_eq!(
        filter.accept(&removed(other)),
        Err(no_impact(IgnoredReason::UnknownMedium))
    );
}

#[test]
fn only_a_clear_of_the_engine_itself_clears() {
    let mut filter = EventFilter::default();
    for ownership in [None, Some("".into())] {
        let all = Event::Cleared { ownership };
        assert_eq!(filter.accept(&all), Ok(TreeChange::Clear));
    }
    let pool = Event::Cleared {
        ownership: Some("pool".into()),
    };
    assert_eq!(
        filter.accept(&pool),
        Err(no_impact(IgnoredReason::SeparateOwner))
    );
}
