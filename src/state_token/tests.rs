use std::time::Duration;

use proptest::prelude::*;

use super::key_ring::CLOCK_SKEW_S;
use super::*;
use crate::ids::Tenant;
use crate::observe::metrics::Registry;
use crate::secret::Secret;

const NOW: u64 = 1_800_000_000;

fn secret(first: u8) -> Secret {
    let digits: String = (0..32u8)
        .map(|at| format!("{:02x}", first.wrapping_add(at)))
        .collect();
    Secret::new(digits)
}

fn key_ring(keys: &[u8]) -> KeyRing {
    with(Settings {
        keys: keys.iter().copied().map(secret).collect(),
        ..Settings::default()
    })
}

fn with(settings: Settings) -> KeyRing {
    KeyRing::new(settings, [7; 32], &Registry::default()).unwrap()
}

fn turn(items: &str) -> Content<'_> {
    Content {
        kind: Kind::Turn,
        response_id: "resp_1",
        model: "sim",
        items,
    }
}

fn rejection(key_ring: &KeyRing, now_s: u64, tenant: Tenant, text: &str) -> RejectReason {
    key_ring.open(now_s, tenant, text).unwrap_err().reason
}

#[test]
fn an_issued_token_gives_back_its_items_byte_for_byte() {
    let key_ring = key_ring(&[1]);
    let long: String = (0..5_000).map(|at| format!("story {at}, é😀 ")).collect();
    let long = format!(r#"[{{"text":"{long}"}}]"#);
    for items in ["[]", r#"[ {"type":"message"} , 1.00 ]"#, &long] {
        let text = key_ring
            .issue(NOW, Tenant::default(), &turn(items))
            .unwrap();
        assert!(
            text.starts_with(PREFIX) && text.len() < 30_000,
            "{}",
            text.len()
        );
        let verified = key_ring.verify(NOW, Tenant::default(), &text).unwrap();
        assert_eq!((verified.kind, &*verified.model), (Kind::Turn, "sim"));
        let opened = key_ring.unpack(verified).unwrap();
        let expected = Payload {
            response_id: "resp_1".to_owned(),
            issued_s: NOW,
            items: items.to_owned(),
        };
        assert_eq!(opened, expected);
    }
}

/// Made by another program from the description in the module header.
#[test]
fn a_token_of_an_earlier_release_is_accepted() {
    const TOKEN: &str = concat!(
        "wrc1.ae216c2e.eyJ2IjoxLCJrIjoidHVybiIsInJpZCI6InJlc3BfMSIsInQiOiI2MmNlMTYzOWZlNjBkYTBhIi",
        "wibSI6InNpbSIsImlhdCI6MTgwMDAwMDAwMCwiZXhwIjoxODAyNTkyMDAwLCJ6Ijoibm9uZSIsIm4iOjQ5LCJlbm",
        "MiOiJub25lIn0.W3sidHlwZSI6Im1lc3NhZ2UiLCJyb2xlIjoidXNlciIsImNvbnRlbnQiOiJoaSJ9XQ.uMsNaK9",
        "O4lQx0mHFaFErBy564XlTdE_FixRYq8k4UEI",
    );
    let opened = key_ring(&[1]).open(NOW, Tenant::default(), TOKEN).unwrap();
    assert_eq!(
        opened.items,
        r#"[{"type":"message","role":"user","content":"hi"}]"#
    );
    assert_eq!(opened.response_id, "resp_1");
}

/// Clients keep a token for as long as it is valid, and send it to a replica of another release. Made by another program,
/// from the description and RFC 5869.
#[test]
fn an_encrypted_token_stays_as_it_is() {
    const TOKEN: &str = concat!(
        "wrc1.ae216c2e.eyJ2IjoxLCJrIjoidHVybiIsInJpZCI6InJlc3BfMSIsInQiOiI2MmNlMTYzOWZlNjBkYTBhIiwi",
        "bSI6InNpbSIsImlhdCI6MTgwMDAwMDAwMCwiZXhwIjoxODAyNTkyMDAwLCJ6Ijoibm9uZSIsIm4iOjQ5LCJlbmMiOi",
        "JYQzIwUCJ9.u2-sc1Zb8-5LdzjAN3xK8rd1v_Ibwsox1RdCiYTNGe0q_YHjZhmx4cC3zLAXAhNz5oxRQKxqTEPmxKx",
        "H3yD_to1xy_l2Xebrt3Nrqe7kh6ir3QS-wMhMji0.x1L7wGHlAzkxB3rTktep29Or8YfhG_upmhoA5m7164U",
    );
    let items = r#"[{"type":"message","role":"user","content":"hi"}]"#;
    let key_ring = key_ring(&[1]);
    let opened = key_ring.open(NOW, Tenant::default(), TOKEN).unwrap();
    assert_eq!(opened.items, items);
    let issued = key_ring.issue(NOW, Tenant::default(), &turn(items));
    assert_eq!(issued.unwrap(), TOKEN);
}

#[test]
fn the_holder_of_a_token_cannot_read_it_unless_it_is_only_signed() {
    use base64::Engine;
    use base64::engine::general_purpose::URL_SAFE_NO_PAD;
    let items = r#"[{"text":"a secret of the conversation"}]"#;
    let signing = with(Settings {
        keys: vec![secret(1)],
        encrypt: false,
        ..Settings::default()
    });
    let encrypting = key_ring(&[1]);
    let body = |text: &str| {
        let body = text.split('.').nth(3).unwrap();
        URL_SAFE_NO_PAD.decode(body).unwrap()
    };
    let signed = signing.issue(NOW, Tenant::default(), &turn(items)).unwrap();
    assert_eq!(body(&signed), items.as_bytes());
    let encrypted = encrypting
        .issue(NOW, Tenant::default(), &turn(items))
        .unwrap();
    let shows = |word: &[u8]| {
        body(&encrypted)
            .windows(word.len())
            .any(|window| window == word)
    };
    assert!(!shows(b"secret") && !shows(b"text"));
    // Each router reads both.
    for key_ring in [&signing, &encrypting] {
        for text in [&signed, &encrypted] {
            let opened = key_ring.open(NOW, Tenant::default(), text).unwrap();
            assert_eq!(opened.items, items);
        }
    }
}

#[test]
fn keys_rotate_without_a_gap() {
    let (a, ab, ba, b) = (
        key_ring(&[1]),
        key_ring(&[1, 100]),
        key_ring(&[100, 1]),
        key_ring(&[100]),
    );
    let issue = |by: &KeyRing| by.issue(NOW, Tenant::default(), &turn("[1]")).unwrap();
    // A rotation: the new key first only verifies, then signs, then remains alone.
    for (by, opens, refuse) in [
        (&a, vec![&a, &ab, &ba], vec![&b]),
        (&ab, vec![&a, &ab, &ba], vec![&b]),
        (&ba, vec![&ab, &ba, &b], vec![&a]),
        (&b, vec![&ab, &ba, &b], vec![&a]),
    ] {
        let text = issue(by);
        for key_ring in opens {
            assert_eq!(
                key_ring.open(NOW, Tenant::default(), &text).unwrap().items,
                "[1]"
            );
        }
        for key_ring in refuse {
            assert_eq!(
                rejection(key_ring, NOW, Tenant::default(), &text),
                RejectReason::UnknownKey
            );
        }
    }
}

#[test]
fn a_token_of_another_tenant_fails_like_a_forged_one() {
    let key_ring = key_ring(&[1]);
    let text = key_ring.issue(NOW, Tenant::of("a"), &turn("[1]")).unwrap();
    let foreign = key_ring.open(NOW, Tenant::of("b"), &text).unwrap_err();
    assert_eq!(foreign.reason, RejectReason::BadSignature);
    let (start, _) = text.rsplit_once('.').unwrap();
    let forged = format!("{start}.{}{}", "A".repeat(39), &text[text.len() - 4..]);
    let refused = key_ring.open(NOW, Tenant::of("a"), &forged).unwrap_err();
    assert_eq!(refused.to_string(), foreign.to_string());
    // Even with a good signature for this tenant, the tenant in the header is checked.
    let header = br#"{"v":1,"k":"turn","rid":"r","t":"0","m":"","iat":1800000000,"exp":1900000000,"z":"none","n":2,"enc":"none"}"#;
    let text = key_ring.sign(Tenant::of("a"), header, b"[]");
    assert_eq!(
        rejection(&key_ring, NOW, Tenant::of("a"), &text),
        RejectReason::WrongTenant
    );
}

#[test]
fn a_token_expires() {
    let ring_of = |expiry_s| {
        with(Settings {
            keys: vec![secret(1)],
            expiry: Duration::from_secs(expiry_s),
            ..Settings::default()
        })
    };
    let (short, long) = (ring_of(1_000), ring_of(1_000_000));
    let text = long.issue(NOW, Tenant::default(), &turn("[]")).unwrap();
    let expired = |key_ring: &KeyRing, now_s| {
        key_ring
            .open(now_s, Tenant::default(), &text)
            .is_err_and(|refused| {
                assert!(refused.to_string().ends_with("has expired."), "{refused}");
                refused.reason == RejectReason::Expired
            })
    };
    // The issuing replica's clock may be ahead of ours.
    assert!(!expired(&long, NOW - 250));
    assert!(!expired(&long, NOW + 1_000_000 + CLOCK_SKEW_S));
    assert!(expired(&long, NOW + 1_000_000 + CLOCK_SKEW_S + 1));
    // A shorter configured expiry holds for tokens that were issued before.
    assert!(expired(&short, NOW + 1_000 + CLOCK_SKEW_S + 1));
    assert!(!expired(&short, NOW + 1_000));
}

#[test]
fn items_that_are_too_large_are_refused_and_never_truncated() {
    let key_ring = with(Settings {
        keys: vec![secret(1)],
        max_size: 4 << 10,
        max_plain_size: 64 << 10,
        ..Settings::default()
    });
    let items = |bytes: usize, filler: &dyn Fn(usize) -> char| -> String {
        let text: String = (0..bytes).map(filler).collect();
        format!("[\"{text}\"]")
    };
    let issue = |items: &str| key_ring.issue(NOW, Tenant::default(), &turn(items));
    let random =
        |at: usize| char::from(b'a' + (xxhash_rust::xxh3::xxh3_64(&at.to_le_bytes()) % 26) as u8);
    assert!(issue(&items(2_000, &random)).is_ok());
    let text = issue(&items(20_000, &random)).unwrap_err();
    assert_eq!(text, TooLarge::Text { max: 4 << 10 });
    let plain = issue(&items(70_000, &|_| 'a')).unwrap_err();
    assert_eq!(plain, TooLarge::Items { max: 64 << 10 });
    assert_eq!(key_ring.check_size(65_537), Err(plain));
    assert_eq!(key_ring.check_size(65_536), Ok(()));
    // A token issued under a larger limit.
    let roomy = super::tests::key_ring(&[1]);
    let text = roomy
        .issue(NOW, Tenant::default(), &turn(&items(20_000, &random)))
        .unwrap();
    assert_eq!(
        rejection(&key_ring, NOW, Tenant::default(), &text),
        RejectReason::TooLarge
    );
    let pattern = |at: usize| random(at % 1_000);
    let text = roomy
        .issue(NOW, Tenant::default(), &turn(&items(70_000, &pattern)))
        .unwrap();
    assert!(text.len() < 4 << 10);
    assert_eq!(
        rejection(&key_ring, NOW, Tenant::default(), &text),
        RejectReason::TooLarge
    );
}

#[test]
fn invalid_content_with_a_good_signature_is_rejected() {
    let key_ring = key_ring(&[1]);
    let tenant = Tenant::default();
    let header = |change: &dyn Fn(&mut serde_json::Value)| {
        let mut header = serde_json::json!({
            "v": 1, "k": "turn", "rid": "resp_1", "t": tenant.as_str(), "m": "sim",
            "iat": NOW, "exp": NOW + 10, "z": "none", "n": 2, "enc": "none", "later": {"a": [1]},
        });
        change(&mut header);
        serde_json::to_vec(&header).unwrap()
    };
    let open = |header: &[u8], body: &[u8]| {
        let text = key_ring.sign(tenant, header, body);
        key_ring
            .open(NOW, tenant, &text)
            .map_err(|refused| refused.reason)
    };
    assert!(open(&header(&|_| ()), b"[]").is_ok());
    for body in [&b"{}"[..], b"[", b"\xff\xff", b"", b"[] ", b"01"] {
        assert_eq!(
            open(&header(&|_| ()), body),
            Err(RejectReason::Unreadable),
            "{body:?}"
        );
    }
    let content: [(&str, serde_json::Value); 9] = [
        ("v", 2.into()),
        ("enc", "A256GCM".into()),
        ("enc", "XC20P".into()),
        ("k", "other".into()),
        ("z", "zstd".into()),
        ("z", "lzma".into()),
        ("n", 3.into()),
        ("exp", "soon".into()),
        ("rid", serde_json::Value::Null),
    ];
    for (name, value) in content {
        let header = header(&|header| header[name] = value.clone());
        assert_eq!(
            open(&header, b"[]"),
            Err(RejectReason::Unreadable),
            "{name}: {value}"
        );
    }
    assert_eq!(
        open(&header(&|header| header["n"] = u64::MAX.into()), b"[]"),
        Err(RejectReason::TooLarge)
    );
    assert_eq!(open(b"", b""), Err(RejectReason::Unreadable));
    assert_eq!(open(b"\xff", b"[]"), Err(RejectReason::Unreadable));
}

#[test]
fn other_texts_are_rejected_and_their_ends_shown() {
    let key_ring = key_ring(&[1]);
    let check = |text: &str, reason, shown: &str| {
        let refused = key_ring.open(NOW, Tenant::default(), text).unwrap_err();
        assert_eq!(refused.reason, reason, "{text}");
        let message = format!("The encrypted content {shown} could not be verified.");
        assert_eq!(refused.to_string(), message);
    };
    check("", RejectReason::Malformed, "");
    check("....", RejectReason::Malformed, "....");
    check(
        "gAAAAABlZm9yZWlnbg==",
        RejectReason::Malformed,
        "gAAAAABl...bg==",
    );
    check(
        "ééééééééééééééééé",
        RejectReason::Malformed,
        "éééééééé...éééé",
    );
    check("wrc1.a.b.c.d", RejectReason::Malformed, "wrc1.a.b.c.d");
    let mac = "A".repeat(43);
    check(
        &format!("wrc1.00000000.e30.W10.{mac}"),
        RejectReason::UnknownKey,
        "wrc1.000...AAAA",
    );
    check(
        &format!("wrc1.00000000.e30.W10.x.{mac}"),
        RejectReason::Malformed,
        "wrc1.000...AAAA",
    );
    check(
        &"A".repeat((4 << 20) + 1),
        RejectReason::TooLarge,
        "AAAAAAAA...AAAA",
    );
}

#[test]
fn without_configured_keys_the_fallback_key_is_used() {
    let of = |own| KeyRing::new(Settings::default(), own, &Registry::default()).unwrap();
    let text = of([1; 32])
        .issue(NOW, Tenant::default(), &turn("[]"))
        .unwrap();
    assert!(of([1; 32]).open(NOW, Tenant::default(), &text).is_ok());
    assert_eq!(
        rejection(&of([2; 32]), NOW, Tenant::default(), &text),
        RejectReason::UnknownKey
    );
}

#[test]
fn all_problems_of_the_settings_are_reported() {
    let settings = Settings {
        keys: vec![
            secret(1),
            Secret::new("short"),
            secret(1),
            Secret::default(),
        ],
        encrypt: true,
        expiry: Duration::from_secs(1),
        max_size: 0,
        max_plain_size: u64::MAX,
    };
    let problems = settings.check();
    let places: Vec<&str> = problems.iter().map(|(key_index, _)| &**key_index).collect();
    assert_eq!(places, ["keys[1]", "keys[2]", "keys[3]",]);
    let keys = (0..17).map(|key_index| secret(key_index * 3)).collect();
    let many = Settings {
        keys,
        ..Settings::default()
    };
    assert_eq!(many.check().len(), 1);
}

#[test]
fn tokens_are_counted_by_outcome() {
    let registry = Registry::default();
    let settings = Settings {
        keys: vec![secret(1), secret(100)],
        ..Settings::default()
    };
    let both = KeyRing::new(settings, [0; 32], &registry).unwrap();
    let older = key_ring(&[100])
        .issue(NOW, Tenant::default(), &turn("[]"))
        .unwrap();
    both.open(NOW, Tenant::default(), &older).unwrap();
    let text = both.issue(NOW, Tenant::default(), &turn("[]")).unwrap();
    both.open(NOW, Tenant::default(), &text).unwrap();
    both.open(NOW, Tenant::of("b"), &text).unwrap_err();
    let page = registry.text();
    for line in [
        "warmroute_state_tokens_total{outcome=\"issued\"} 1",
        "warmroute_state_tokens_total{outcome=\"accepted\"} 1",
        "warmroute_state_tokens_total{outcome=\"accepted_with_older_key\"} 1",
        "warmroute_state_tokens_rejected_total{reason=\"bad_signature\"} 1",
        "warmroute_state_tokens_rejected_total{reason=\"expired\"} 0",
        "use=\"active\"} 1",
    ] {
        assert!(page.contains(line), "{line} is not in\n{page}");
    }
}

/// Items of random and repetitive text.
fn items() -> impl Strategy<Value = String> {
    (any::<String>(), 0..200usize)
        .prop_map(|(text, times)| serde_json::to_string(&vec![text.repeat(times), text]).unwrap())
}

proptest! {
    #[test]
    fn any_items_are_given_back(items in items(), tenant in ".*") {
        let key_ring = key_ring(&[1]);
        let tenant = Tenant::of(&tenant);
        let text = key_ring.issue(NOW, tenant, &turn(&items)).unwrap();
        prop_assert_eq!(key_ring.open(NOW, tenant, &text).unwrap().items, items);
    }

    #[test]
    fn a_changed_byte_is_always_rejected(items in items(), at in any::<prop::sample::Index>(), byte in 0..128u8) {
        let key_ring = key_ring(&[1]);
        let text = key_ring.issue(NOW, Tenant::default(), &turn(&items)).unwrap();
        let mut bytes = text.clone().into_bytes();
        bytes[at.index(text.len())] = byte;
        let changed = String::from_utf8(bytes).unwrap();
        prop_assume!(changed != text);
        let refused = key_ring.open(NOW, Tenant::default(), &changed).unwrap_err();
        prop_assert!(matches!(refused.reason, RejectReason::Malformed | RejectReason::UnknownKey | RejectReason::BadSignature));
    }

    #[test]
    fn truncated_extended_or_rearranged_tokens_are_rejected(
        items in items(), at in any::<prop::sample::Index>(), other in ".{0,3}",
    ) {
        let key_ring = key_ring(&[1]);
        let text = key_ring.issue(NOW, Tenant::default(), &turn(&items)).unwrap();
        let at = at.index(text.len());
        let (start, end) = text.split_at(at);
        let mut changes = vec![start.to_owned(), end.to_owned(), format!("{end}{start}")];
        if !other.is_empty() {
            changes.push(format!("{start}{other}{end}"));
            changes.push(format!("{text}{other}"));
        }
        for changed in changes.iter().filter(|changed| **changed != text) {
            prop_assert!(key_ring.open(NOW, Tenant::default(), changed).is_err(), "{}", changed);
        }
    }
}

#[test]
fn every_byte_of_a_token_is_checked() {
    let key_ring = key_ring(&[1]);
    let text = key_ring
        .issue(NOW, Tenant::default(), &turn(r#"["x"]"#))
        .unwrap();
    for at in 0..text.len() {
        for bit in 0..7 {
            let mut bytes = text.clone().into_bytes();
            bytes[at] ^= 1 << bit;
            let changed = String::from_utf8(bytes).unwrap();
            assert!(
                key_ring.open(NOW, Tenant::default(), &changed).is_err(),
                "{changed}"
            );
        }
    }
}

#[test]
fn a_token_fits_into_a_request_body() {
    let within = |max_body| Settings::default().max_size_within(max_body);
    assert_eq!(within(64 << 20), 4 << 20);
    assert_eq!(within(100_000), 100_000);
    assert_eq!(within(1), 4 << 10);
}

#[test]
fn a_token_is_as_long_as_the_bodies_of_requests_may_be_now() {
    let key_ring = key_ring(&[1]);
    let random =
        |at: u64| char::from(b'a' + (xxhash_rust::xxh3::xxh3_64(&at.to_le_bytes()) % 26) as u8);
    let text: String = (0..20_000).map(random).collect();
    let items = format!("[\"{text}\"]");
    let issue = || key_ring.issue(NOW, Tenant::default(), &turn(&items));
    let long = issue().unwrap();
    key_ring.set_max_body(4 << 10);
    assert_eq!(issue().unwrap_err(), TooLarge::Text { max: 4 << 10 });
    assert_eq!(
        rejection(&key_ring, NOW, Tenant::default(), &long),
        RejectReason::TooLarge
    );
    key_ring.set_max_body(64 << 20);
    assert!(key_ring.open(NOW, Tenant::default(), &long).is_ok());
}
