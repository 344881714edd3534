//! State that the client keeps for us: a signed text that leaves with one answer and comes back with a
//! later request, so that a conversation can go on at any replica and none of them stores it.
//!
//! ```text
//! wrc1.<key id>.<header>.<body>.<mac>
//!      8 hex     JSON     items  HMAC-SHA256 over all that stands before the last dot
//! ```
//!
//! Header, body and mac are base64url without padding. The key of the mac is derived (HKDF-SHA256) from
//! a key of the ring for one purpose and one tenant, so one tenant's carrier fails for another as a
//! forged one does. The mac is checked, in constant time, before anything is decoded.
//!
//! **Signed, not secret**: whoever holds a carrier can read it. The header names the layer inside
//! (`enc`), so that an encrypted one can be added and told apart. And a carrier cannot be called back:
//! its holder may use it again and again until it expires, which is what makes branches.
//!
//! Pure: the time and the randomness come in.

mod body;
mod header;
mod key;
mod rejection;

use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use prometheus::IntCounter;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use self::body::Packed;
use self::header::{Encryption, Header};
pub use self::key::Key;
pub use self::rejection::{RejectReason, Rejected, TooLarge};
use crate::ids::Tenant;
use crate::observe::metrics::Registry;
use crate::secret::Secret;

/// What every carrier of this version begins with.
pub const PREFIX: &str = "wrc1.";

/// How far the clocks of two replicas may be apart.
const CLOCK_SKEW_S: u64 = 300;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    /// The first signs; all of them open. Each at least 32 random bytes, as hex or base64.
    pub keys: Vec<Secret>,
    /// How long a carrier can be opened.
    pub expiry_s: u64,
    /// Of a carrier's text. Its client sends it with every request, so it counts against the limit of
    /// a request's body.
    pub bytes_max: u64,
    /// Of the items in it, before compression.
    pub plain_bytes_max: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            keys: Vec::new(),
            // As long as stored responses are kept.
            expiry_s: 30 * 24 * 3_600,
            // A million tokens of text compress to about a megabyte; some images fit as well.
            bytes_max: 4 << 20,
            plain_bytes_max: 16 << 20,
        }
    }
}

/// More are a forgotten rotation; each makes a start slower, none a request.
const KEYS_MAX: usize = 16;
const BYTES_MIN: u64 = 4 << 10;

impl Settings {
    /// With carriers no longer than a request's body may be, in which they come back.
    pub fn within(mut self, body_bytes_max: u64) -> Self {
        self.bytes_max = self.bytes_max.min(body_bytes_max.max(BYTES_MIN));
        self
    }

    /// The keys, or for each thing that is wrong the key below this section and the message.
    pub fn check(&self) -> Result<Vec<Key>, Vec<(String, String)>> {
        let mut problems = Vec::new();
        let mut keys: Vec<Key> = Vec::new();
        for (key_index, secret) in self.keys.iter().enumerate() {
            let at = format!("keys[{key_index}]");
            match Key::parse(secret) {
                Ok(key) => match keys.iter().position(|other| other.id() == key.id()) {
                    Some(_) => problems.push((at, "is listed twice".to_owned())),
                    None => keys.push(key),
                },
                Err(why) => problems.push((at, why.to_owned())),
            }
        }
        if self.keys.len() > KEYS_MAX {
            let message = format!("has {} keys; up to {KEYS_MAX} are used", self.keys.len());
            problems.push(("keys".to_owned(), message));
        }
        let ranges = [
            ("expiry_s", self.expiry_s, 60, 10 * 365 * 24 * 3_600),
            ("bytes_max", self.bytes_max, BYTES_MIN, 1 << 30),
            ("plain_bytes_max", self.plain_bytes_max, BYTES_MIN, 1 << 30),
        ];
        for (name, value, min, max) in ranges {
            if !(min..=max).contains(&value) {
                let message = format!("must be from {min} to {max}, not {value}");
                problems.push((name.to_owned(), message));
            }
        }
        if problems.is_empty() {
            Ok(keys)
        } else {
            Err(problems)
        }
    }
}

/// What a carrier is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A conversation's items up to and including one answer's output.
    Turn,
    /// One reasoning item, with the text that its client is not shown.
    Reasoning,
    /// The items that a compaction stands for.
    Compaction,
}

/// What goes into a carrier.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Content<'a> {
    pub kind: Kind,
    /// The response that it leaves with.
    pub response_id: &'a str,
    pub model: &'a str,
    /// A JSON array of items.
    pub items: &'a str,
}

/// What was in a carrier.
#[derive(Clone, Debug, PartialEq)]
pub struct Payload {
    pub kind: Kind,
    pub response_id: String,
    pub model: String,
    /// Seconds since 1970.
    pub issued_s: u64,
    /// A JSON array of items, byte for byte as it was sealed.
    pub items: String,
}

/// A carrier that is known to be ours, still packed.
#[derive(Debug)]
pub struct Verified<'a> {
    pub kind: Kind,
    pub model: String,
    /// Of its items, once they are unpacked.
    pub plain_bytes: u64,
    response_id: String,
    issued_s: u64,
    compression: body::Compression,
    body: &'a str,
    /// The whole.
    text: &'a str,
    /// Of the key that it was signed with.
    key_index: usize,
}

impl Payload {
    /// The items one by one, as they stand.
    pub fn each(&self) -> Vec<&RawValue> {
        // Checked when it was opened.
        serde_json::from_str(&self.items).unwrap_or_default()
    }
}

#[derive(Clone, Debug)]
struct Metrics {
    sealed: IntCounter,
    opened: IntCounter,
    opened_with_older_key: IntCounter,
    too_large: IntCounter,
    sealed_bytes: IntCounter,
    opened_bytes: IntCounter,
    refused: [IntCounter; RejectReason::ALL.len()],
}

impl Metrics {
    fn new(registry: &Registry, keys: &[Key]) -> Self {
        let carriers = registry.counters(
            "warmroute_carriers_total",
            "State carriers, by what was done: sealed; opened with the active key or with an older \
             one; or not sealed because too large.",
            &["op"],
        );
        let bytes = registry.counters(
            "warmroute_carrier_bytes_total",
            "Bytes of carriers as text, by what was done with them.",
            &["op"],
        );
        let refused = registry.counters(
            "warmroute_carriers_refused_total",
            "State carriers that were not opened, by why.",
            &["reason"],
        );
        let info = registry.gauges(
            "warmroute_carrier_key_info",
            "The keys of carriers: the active one signs, the others only open. Always 1.",
            &["key", "use"],
        );
        for (key_index, key) in keys.iter().enumerate() {
            let used = if key_index == 0 {
                "active"
            } else {
                "open_only"
            };
            info.with_label_values(&[key.id(), used]).set(1);
        }
        Self {
            sealed: carriers.with_label_values(&["sealed"]),
            opened: carriers.with_label_values(&["opened"]),
            opened_with_older_key: carriers.with_label_values(&["opened_with_older_key"]),
            too_large: carriers.with_label_values(&["too_large"]),
            sealed_bytes: bytes.with_label_values(&["sealed"]),
            opened_bytes: bytes.with_label_values(&["opened"]),
            refused: RejectReason::ALL.map(|reason| refused.with_label_values(&[reason.as_str()])),
        }
    }
}

/// The keys of this router and what it does with them: seals with the first, opens with any.
pub struct KeyRing {
    keys: Vec<Key>,
    settings: Settings,
    metrics: Metrics,
}

impl fmt::Debug for KeyRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyRing").field("keys", &self.keys).finish()
    }
}

impl KeyRing {
    /// `own` is the key where none is configured: random bytes, so that such a router's carriers die with it.
    /// Fails as [`Settings::check`] does.
    pub fn new(
        settings: Settings,
        own: [u8; 32],
        registry: &Registry,
    ) -> Result<Self, Vec<(String, String)>> {
        let mut keys = settings.check()?;
        if keys.is_empty() {
            keys.push(Key::new(&own));
        }
        Ok(Self {
            metrics: Metrics::new(registry, &keys),
            keys,
            settings,
        })
    }

    /// Whether items of so many bytes can be sealed: to refuse a request before it costs anything, rather
    /// than after its answer. Whether they compress well enough shows only then.
    pub fn has_room(&self, plain_bytes: usize) -> Result<(), TooLarge> {
        self.fits(plain_bytes)
            .inspect_err(|_| self.metrics.too_large.inc())
    }

    fn fits(&self, plain_bytes: usize) -> Result<(), TooLarge> {
        let max = self.settings.plain_bytes_max;
        match plain_bytes as u64 > max {
            true => Err(TooLarge::Items { max }),
            false => Ok(()),
        }
    }

    /// Signs items for a tenant at `now_s` (seconds since 1970). `content.items` must be a JSON array.
    pub fn issue(
        &self,
        now_s: u64,
        tenant: Tenant,
        content: &Content<'_>,
    ) -> Result<String, TooLarge> {
        let sealed = self
            .fits(content.items.len())
            .and_then(|()| self.issue_within(now_s, tenant, content));
        match &sealed {
            Ok(text) => {
                self.metrics.sealed.inc();
                self.metrics.sealed_bytes.inc_by(text.len() as u64);
            }
            Err(_) => self.metrics.too_large.inc(),
        }
        sealed
    }

    fn issue_within(
        &self,
        now_s: u64,
        tenant: Tenant,
        content: &Content<'_>,
    ) -> Result<String, TooLarge> {
        let packed = Packed::pack(content.items.as_bytes());
        let header = Header {
            v: header::VERSION,
            k: content.kind,
            rid: content.response_id.to_owned(),
            t: tenant.as_str().to_owned(),
            m: content.model.to_owned(),
            iat: now_s,
            exp: now_s.saturating_add(self.settings.expiry_s),
            z: packed.compression,
            n: content.items.len() as u64,
            enc: Encryption::None,
        };
        let text = self.sign(tenant, &header.to_json(), &packed.bytes);
        let max = self.settings.bytes_max;
        match text.len() as u64 > max {
            true => Err(TooLarge::Text { max }),
            false => Ok(text),
        }
    }

    /// Signs a header and a body as they are, for tests of what comes after the signature.
    #[doc(hidden)]
    pub fn sign(&self, tenant: Tenant, header: &[u8], body: &[u8]) -> String {
        let key = &self.keys[0];
        let mut text = format!("{PREFIX}{}.", key.id());
        URL_SAFE_NO_PAD.encode_string(header, &mut text);
        text.push('.');
        URL_SAFE_NO_PAD.encode_string(body, &mut text);
        let mac = key.mac(tenant, text.as_bytes());
        text.push('.');
        URL_SAFE_NO_PAD.encode_string(mac, &mut text);
        text
    }

    /// Opens a carrier of this tenant at `now_s` (seconds since 1970). Any other text, however made, is
    /// a rejection.
    pub fn open(&self, now_s: u64, tenant: Tenant, text: &str) -> Result<Payload, Rejected> {
        let verified = self.verify(now_s, tenant, text)?;
        self.unpack(verified)
    }

    /// The first half of [`KeyRing::open`]: what its header says, before anything large is made of it.
    pub fn verify<'a>(
        &self,
        now_s: u64,
        tenant: Tenant,
        text: &'a str,
    ) -> Result<Verified<'a>, Rejected> {
        self.verify_text(now_s, tenant, text)
            .map_err(|reason| self.reject(reason, text))
    }

    /// The second half of it.
    pub fn unpack(&self, verified: Verified<'_>) -> Result<Payload, Rejected> {
        let Verified {
            text, key_index, ..
        } = verified;
        let opened = unpack(verified).map_err(|reason| self.reject(reason, text))?;
        match key_index {
            0 => self.metrics.opened.inc(),
            _ => self.metrics.opened_with_older_key.inc(),
        }
        self.metrics.opened_bytes.inc_by(text.len() as u64);
        Ok(opened)
    }

    /// What all carriers of one request may hold together.
    pub fn plain_bytes_max(&self) -> u64 {
        self.settings.plain_bytes_max
    }

    fn reject(&self, reason: RejectReason, text: &str) -> Rejected {
        self.metrics.refused[reason as usize].inc();
        Rejected::new(reason, text)
    }

    fn verify_text<'a>(
        &self,
        now_s: u64,
        tenant: Tenant,
        text: &'a str,
    ) -> Result<Verified<'a>, RejectReason> {
        if text.len() as u64 > self.settings.bytes_max {
            return Err(RejectReason::TooLarge);
        }
        let Parts {
            key_id,
            header,
            body,
            mac,
            signed,
        } = Parts::of(text).ok_or(RejectReason::Malformed)?;
        let mut keys = self.keys.iter();
        let key_index = keys
            .position(|key| key.id() == key_id)
            .ok_or(RejectReason::UnknownKey)?;
        if !self.keys[key_index].verifies(tenant, signed.as_bytes(), &mac) {
            return Err(RejectReason::BadSignature);
        }
        // From here on it is what some replica wrote. Bounds still hold: a key may leak.
        let header = decode(header)?;
        let header = Header::from_json(&header).ok_or(RejectReason::Unreadable)?;
        if header.v != header::VERSION || header.enc != Encryption::None {
            return Err(RejectReason::Unreadable);
        }
        if header.t != tenant.as_str() {
            return Err(RejectReason::WrongTenant);
        }
        // Both the time it was given and the time that holds today, which may have been made shorter.
        let expires_s = header
            .exp
            .min(header.iat.saturating_add(self.settings.expiry_s));
        if now_s > expires_s.saturating_add(CLOCK_SKEW_S) {
            return Err(RejectReason::Expired);
        }
        if header.n > self.settings.plain_bytes_max {
            return Err(RejectReason::TooLarge);
        }
        Ok(Verified {
            kind: header.k,
            model: header.m,
            plain_bytes: header.n,
            response_id: header.rid,
            issued_s: header.iat,
            compression: header.z,
            body,
            text,
            key_index,
        })
    }
}

fn unpack(verified: Verified<'_>) -> Result<Payload, RejectReason> {
    let packed = Packed {
        compression: verified.compression,
        bytes: decode(verified.body)?,
    };
    let plain_bytes = usize::try_from(verified.plain_bytes).map_err(|_| RejectReason::TooLarge)?;
    let items = packed.unpack(plain_bytes)?;
    let items = String::from_utf8(items).map_err(|_| RejectReason::Unreadable)?;
    serde_json::from_str::<Vec<&RawValue>>(&items).map_err(|_| RejectReason::Unreadable)?;
    Ok(Payload {
        kind: verified.kind,
        response_id: verified.response_id,
        model: verified.model,
        issued_s: verified.issued_s,
        items,
    })
}

/// A carrier's text cut at its dots. Only the mac is decoded.
struct Parts<'a> {
    key_id: &'a str,
    header: &'a str,
    body: &'a str,
    mac: [u8; key::MAC_BYTES],
    /// What the mac is over.
    signed: &'a str,
}

impl<'a> Parts<'a> {
    fn of(text: &'a str) -> Option<Self> {
        let (signed, mac) = text.rsplit_once('.')?;
        let mut parts = signed.strip_prefix(PREFIX)?.split('.');
        let (key_id, header, body) = (parts.next()?, parts.next()?, parts.next()?);
        if parts.next().is_some() {
            return None;
        }
        Some(Self {
            key_id,
            header,
            body,
            mac: URL_SAFE_NO_PAD.decode(mac).ok()?.try_into().ok()?,
            signed,
        })
    }
}

fn decode(text: &str) -> Result<Vec<u8>, RejectReason> {
    URL_SAFE_NO_PAD
        .decode(text)
        .map_err(|_| RejectReason::Unreadable)
}

#[cfg(test)]
mod tests;
