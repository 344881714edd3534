use super::*;
use crate::kv::event::ExtraKey;

fn stored(change: impl FnOnce(&mut Stored)) -> Event {
    let mut stored = Stored {
        names: vec![Name(1), Name(2)],
        token_ids: vec![1, 2, 3, 4],
        block_size: 2,
        ..Stored::default()
    };
    change(&mut stored);
    Event::Stored(stored)
}

fn removed(change: impl FnOnce(&mut Place)) -> Event {
    let mut place = Place::default();
    change(&mut place);
    Event::Removed(Removed {
        names: vec![Name(1)],
        place,
    })
}

fn text(text: &str) -> ExtraKey {
    ExtraKey::Text(text.into())
}

/// What comes of the last of `events`: a root or parent and the local hashes, or why not.
fn check(events: &[Event]) -> Result<(Parent, Vec<u64>), Left> {
    let mut admit = Admit::default();
    let (last, before) = events.split_last().unwrap();
    for event in before {
        let _ = admit.admit(event);
    }
    match admit.admit(last)? {
        Change::Store { after, blocks, .. } => {
            Ok((after, blocks.iter().map(|block| block.local.0).collect()))
        }
        other => panic!("{other:?}"),
    }
}

fn why(events: &[Event]) -> (Filtered, Harm) {
    let left = check(events).unwrap_err();
    (left.why, left.harm)
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
    let next = stored(|stored| stored.parent = Some(Name(9)));
    assert_eq!(check(&[next]), Ok((Parent::Block(Name(9)), plain())));
    let odd = stored(|stored| {
        stored.parent = Some(Name(9));
        stored.extra_keys = vec![vec![text("t")], vec![]];
    });
    let (after, locals) = check(&[odd]).unwrap();
    assert_eq!(after, Parent::Block(Name(9)));
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
            stored.place.group = Some(group);
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
        assert_eq!(why(&[of(3, kind)]), (Filtered::Attention, Harm::None));
        assert_eq!(why(&[of(0, kind)]), (Filtered::Attention, Harm::None));
    }
    let unknown = (Filtered::UnknownAttention, Harm::Incomplete);
    assert_eq!(why(&[of(0, "holographic")]), unknown);
    let untold = stored(|stored| stored.place.group = Some(3));
    let unlearnt = (Filtered::UnknownGroup, Harm::Incomplete);
    assert_eq!(why(std::slice::from_ref(&untold)), unlearnt);
    assert!(check(&[of(3, "full_attention"), untold]).is_ok());
    let changed = (Filtered::GroupChanged, Harm::Opaque);
    assert_eq!(why(&[of(3, "full_attention"), of(3, "mamba")]), changed);
    assert_eq!(why(&[stored(|_| {}), of(0, "mamba")]), changed);
}

#[test]
fn what_is_not_understood_is_left_out() {
    let cases: [(&str, Event, Filtered, Harm); 10] = [
        (
            "medium",
            stored(|s| s.place.medium = Medium::Other("HBM".into())),
            Filtered::UnknownMedium,
            Harm::None,
        ),
        (
            "remote",
            stored(|s| s.place.locality = Some("REMOTE".into())),
            Filtered::Remote,
            Harm::None,
        ),
        (
            "locality",
            stored(|s| s.place.locality = Some("ORBIT".into())),
            Filtered::UnknownLocality,
            Harm::Incomplete,
        ),
        (
            "ownership",
            stored(|s| s.place.ownership = Some("pool".into())),
            Filtered::Ownership,
            Harm::None,
        ),
        (
            "block size",
            stored(|s| s.block_size = 0),
            Filtered::NoBlockSize,
            Harm::Incomplete,
        ),
        (
            "a placeholder of a lower tier",
            stored(|s| {
                s.block_size = 0;
                s.token_ids.clear();
                s.place.medium = Medium::Cpu;
            }),
            Filtered::NoBlockSize,
            Harm::None,
        ),
        (
            "tokens",
            stored(|s| s.token_ids.truncate(3)),
            Filtered::Sparse,
            Harm::Incomplete,
        ),
        (
            "keys",
            stored(|s| s.extra_keys = vec![vec![]]),
            Filtered::Sparse,
            Harm::Incomplete,
        ),
        (
            "adapter",
            stored(|s| s.lora_id = Some(1)),
            Filtered::UnnamedAdapter,
            Harm::Incomplete,
        ),
        (
            "event",
            Event::Unknown { kind: "x".into() },
            Filtered::UnknownEvent,
            Harm::Opaque,
        ),
    ];
    for (name, event, filtered, harm) in cases {
        assert_eq!(why(&[event]), (filtered, harm), "{name}");
    }
    let other = stored(|s| {
        s.block_size = 4;
        s.names.truncate(1);
    });
    let changed = (Filtered::BlockSizeChanged, Harm::Incomplete);
    assert_eq!(why(&[stored(|_| {}), other.clone()]), changed);
    assert!(check(&[other]).is_ok());
}

#[test]
fn a_removal_touches_only_what_its_store_could_have_put_there() {
    let names = [Name(1)];
    let mut admit = Admit::default();
    let gpu = Change::Remove {
        names: &names,
        tier: Tier::Gpu,
    };
    assert_eq!(admit.admit(&removed(|_| {})), Ok(gpu.clone()));
    let local = removed(|place| place.locality = Some("LOCAL".into()));
    assert_eq!(admit.admit(&local), Ok(gpu));
    let others = [
        (
            removed(|place| place.group = Some(1)),
            Filtered::UnknownGroup,
        ),
        (
            removed(|place| place.locality = Some("REMOTE".into())),
            Filtered::Remote,
        ),
        (
            removed(|place| place.ownership = Some("pool".into())),
            Filtered::Ownership,
        ),
    ];
    for (event, why) in others {
        assert_eq!(admit.admit(&event), Err(harmless(why)));
    }
    let window = stored(|stored| {
        stored.place.group = Some(1);
        stored.spec_kind = Some("sliding_window".into());
    });
    let _ = admit.admit(&window);
    let other = removed(|place| place.group = Some(1));
    assert_eq!(admit.admit(&other), Err(harmless(Filtered::Attention)));
}

#[test]
fn a_removal_from_an_unknown_medium_is_of_what_was_stored_there_or_of_everything() {
    let names = [Name(1)];
    let other = |place: &mut Place| place.medium = Medium::Other("HBM".into());
    let mut admit = Admit::default();
    assert_eq!(
        admit.admit(&removed(other)),
        Ok(Change::Forget {
            names: &names,
            why: Filtered::UnknownMedium
        })
    );
    let _ = admit.admit(&stored(|stored| other(&mut stored.place)));
    assert_eq!(
        admit.admit(&removed(other)),
        Err(harmless(Filtered::UnknownMedium))
    );
}

#[test]
fn only_a_clear_of_the_engine_itself_clears() {
    let mut admit = Admit::default();
    let all = Event::Cleared { ownership: None };
    assert_eq!(admit.admit(&all), Ok(Change::Clear));
    let pool = Event::Cleared {
        ownership: Some("pool".into()),
    };
    assert_eq!(admit.admit(&pool), Err(harmless(Filtered::Ownership)));
}
