//! Any text as a state token, and any header and body with a good signature. Nothing panics, an unsigned text
//! is never accepted, and an issued token gives back its items.

#![no_main]

use libfuzzer_sys::fuzz_target;
use warmroute::state_token::{Content, Key, Kind, KeyRing, Settings};
use warmroute::ids::Tenant;
use warmroute::observe::metrics::Registry;
use warmroute::secret::Secret;

const NOW_S: u64 = 1_800_000_000;

// The first byte chooses; the second says where a header ends, or which byte is changed.
fuzz_target!(|bytes: &[u8]| {
    let [choice, at, rest @ ..] = bytes else {
        return;
    };
    let settings = Settings {
        max_size: 64 << 10,
        max_plain_size: 64 << 10,
        ..Settings::default()
    };
    let key_ring = KeyRing::new(settings, [7; 32], &Registry::default()).expect("good settings");
    let tenant = Tenant::default();
    let text = String::from_utf8_lossy(rest);
    match choice % 4 {
        0 => assert!(key_ring.open(NOW_S, tenant, &text).is_err()),
        1 => {
            let _ = Key::parse(&Secret::new(text));
        }
        2 => {
            let (header, body) = rest.split_at(rest.len().min(usize::from(*at)));
            let signed = key_ring.sign(tenant, header, body);
            if let Ok(opened) = key_ring.open(NOW_S, tenant, &signed) {
                assert!(opened.items.len() <= 64 << 10);
                let _ = opened.each();
            }
        }
        _ => {
            let items = serde_json::to_string(&[&text]).expect("text is JSON");
            let content = Content {
                kind: Kind::Turn,
                response_id: "resp_1",
                model: "sim",
                items: &items,
            };
            let Ok(token) = key_ring.issue(NOW_S, tenant, &content) else {
                return;
            };
            let opened = key_ring.open(NOW_S, tenant, &token).expect("just issued");
            assert_eq!(opened.items, items);
            let mut changed = token.into_bytes();
            let index = usize::from(*at) * 257 % changed.len();
            changed[index] ^= 1;
            let changed = String::from_utf8_lossy(&changed).into_owned();
            assert!(key_ring.open(NOW_S, tenant, &changed).is_err());
        }
    }
});
