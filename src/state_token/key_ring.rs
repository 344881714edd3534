//! Issues, verifies and unpacks state tokens with the router's keys. No I/O and no clock: the time is an argument.

use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::value::RawValue;

use super::body::Packed;
use super::encryption::{self, Encryption};
use super::header::{self, Header};
use super::key::{Key, MAC_BYTES};
use super::metrics::Metrics;
use super::rejection::{RejectReason, Rejected, TooLarge};
use super::settings::Settings;
use super::types::{Content, PREFIX, Payload, Verified};
use crate::ids::Tenant;
use crate::observe::metrics::Registry;

/// How far apart the clocks of two replicas may be.
pub(super) const CLOCK_SKEW_S: u64 = 300;

/// Issues tokens with the first key and accepts tokens of any key.
pub struct KeyRing {
    keys: Vec<Key>,
    settings: Settings,
    /// The longest token: as configured, and no longer than a request's body may be at the time.
    max_size: AtomicU64,
    metrics: Metrics,
}

impl fmt::Debug for KeyRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyRing").field("keys", &self.keys).finish()
    }
}

impl KeyRing {
    /// `fallback_key` (random bytes) is used if no key is configured. Tokens issued with it are worthless
    /// after a restart. Fails as [`Settings::check`] does.
    pub fn new(
        settings: Settings,
        fallback_key: [u8; 32],
        registry: &Registry,
    ) -> Result<Self, Vec<(String, String)>> {
        let mut keys = settings.parse_keys()?;
        if keys.is_empty() {
            keys.push(Key::new(&fallback_key));
        }
        Ok(Self {
            metrics: Metrics::new(registry, &keys),
            keys,
            max_size: AtomicU64::new(settings.max_size),
            settings,
        })
    }

    /// Tokens are no longer than this from now on: they come back in the body of a request.
    pub fn set_max_body(&self, max_body: u64) {
        let max_size = self.settings.max_size_within(max_body);
        self.max_size.store(max_size, Relaxed);
    }

    /// Checks the size of items before the request goes to an engine. [`KeyRing::issue`] may still find the token too
    /// large, because the token's size depends on how well the items compress.
    pub fn check_size(&self, plain_bytes: usize) -> Result<(), TooLarge> {
        self.check_plain_size(plain_bytes)
            .inspect_err(|_| self.metrics.too_large.inc())
    }

    fn check_plain_size(&self, plain_bytes: usize) -> Result<(), TooLarge> {
        let max = self.settings.max_plain_size;
        if plain_bytes as u64 > max {
            Err(TooLarge::Items { max })
        } else {
            Ok(())
        }
    }

    /// Makes a token for a tenant at `now_s` (Unix seconds). `content.items` must be a JSON array.
    pub fn issue(
        &self,
        now_s: u64,
        tenant: Tenant,
        content: &Content<'_>,
    ) -> Result<String, TooLarge> {
        let issued = self
            .check_plain_size(content.items.len())
            .and_then(|()| self.issue_within(now_s, tenant, content));
        match &issued {
            Ok(text) => {
                self.metrics.issued.inc();
                self.metrics.issued_bytes.inc_by(text.len() as u64);
            }
            Err(_) => self.metrics.too_large.inc(),
        }
        issued
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
            exp: now_s.saturating_add(self.settings.expiry.as_secs()),
            z: packed.compression,
            n: content.items.len() as u64,
            enc: if self.settings.encrypt {
                Encryption::XChaCha20Poly1305
            } else {
                Encryption::None
            },
        };
        let encryption = header.enc;
        let header = header.to_json();
        let body = match encryption {
            Encryption::None => packed.bytes,
            Encryption::XChaCha20Poly1305 => {
                encryption::encrypt(&self.keys[0], tenant, &header, packed.bytes)
            }
        };
        let text = self.sign(tenant, &header, &body);
        let max = self.max_size.load(Relaxed);
        if text.len() as u64 > max {
            Err(TooLarge::Text { max })
        } else {
            Ok(text)
        }
    }

    /// Signs any header and body, so that tests reach the checks behind the signature.
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

    /// Verifies and unpacks a token of this tenant at `now_s` (Unix seconds).
    pub fn open(&self, now_s: u64, tenant: Tenant, text: &str) -> Result<Payload, Rejected> {
        let verified = self.verify(now_s, tenant, text)?;
        self.unpack(verified)
    }

    /// The first half of [`KeyRing::open`]: checks signature, tenant, expiry and declared size, and allocates
    /// nothing large.
    pub fn verify<'a>(
        &self,
        now_s: u64,
        tenant: Tenant,
        text: &'a str,
    ) -> Result<Verified<'a>, Rejected> {
        self.verify_text(now_s, tenant, text)
            .map_err(|reason| self.reject(reason, text))
    }

    /// The second half of [`KeyRing::open`]: decompresses and parses the items.
    pub fn unpack(&self, verified: Verified<'_>) -> Result<Payload, Rejected> {
        let Verified {
            text, key_index, ..
        } = verified;
        let key = &self.keys[key_index];
        let payload = unpack(key, verified).map_err(|reason| self.reject(reason, text))?;
        match key_index {
            0 => self.metrics.accepted.inc(),
            _ => self.metrics.accepted_with_older_key.inc(),
        }
        self.metrics.accepted_bytes.inc_by(text.len() as u64);
        Ok(payload)
    }

    /// Limit on the unpacked items of all tokens in one request together.
    pub fn plain_bytes_max(&self) -> u64 {
        self.settings.max_plain_size
    }

    fn reject(&self, reason: RejectReason, text: &str) -> Rejected {
        self.metrics.rejected[reason as usize].inc();
        Rejected::new(reason, text)
    }

    fn verify_text<'a>(
        &self,
        now_s: u64,
        tenant: Tenant,
        text: &'a str,
    ) -> Result<Verified<'a>, RejectReason> {
        if text.len() as u64 > self.max_size.load(Relaxed) {
            return Err(RejectReason::TooLarge);
        }
        let Parts {
            key_id,
            header,
            body,
            mac,
            signed,
        } = Parts::split(text).ok_or(RejectReason::Malformed)?;
        let mut keys = self.keys.iter();
        let key_index = keys
            .position(|key| key.id() == key_id)
            .ok_or(RejectReason::UnknownKey)?;
        if !self.keys[key_index].verifies(tenant, signed.as_bytes(), &mac) {
            return Err(RejectReason::BadSignature);
        }
        // The signature is right, so a replica wrote header and body. Sizes are checked nevertheless: whoever has a
        // leaked key could otherwise exhaust the router's memory.
        let header_json = decode(header)?;
        let header = Header::from_json(&header_json).ok_or(RejectReason::Unreadable)?;
        if header.v != header::VERSION {
            return Err(RejectReason::Unreadable);
        }
        if header.t != tenant.as_str() {
            return Err(RejectReason::WrongTenant);
        }
        // A shorter configured expiry also applies to tokens that were issued before.
        let expires_s = header
            .exp
            .min(header.iat.saturating_add(self.settings.expiry.as_secs()));
        if now_s > expires_s.saturating_add(CLOCK_SKEW_S) {
            return Err(RejectReason::Expired);
        }
        if header.n > self.settings.max_plain_size {
            return Err(RejectReason::TooLarge);
        }
        Ok(Verified {
            kind: header.k,
            model: header.m,
            plain_bytes: header.n,
            response_id: header.rid,
            issued_s: header.iat,
            compression: header.z,
            encryption: header.enc,
            tenant,
            header: header_json,
            body,
            text,
            key_index,
        })
    }
}

fn unpack(key: &Key, verified: Verified<'_>) -> Result<Payload, RejectReason> {
    let body = decode(verified.body)?;
    let packed = Packed {
        compression: verified.compression,
        bytes: match verified.encryption {
            Encryption::None => body,
            Encryption::XChaCha20Poly1305 => {
                encryption::decrypt(key, verified.tenant, &verified.header, body)?
            }
        },
    };
    let plain_bytes = usize::try_from(verified.plain_bytes).map_err(|_| RejectReason::TooLarge)?;
    let items = packed.unpack(plain_bytes)?;
    let items = String::from_utf8(items).map_err(|_| RejectReason::Unreadable)?;
    serde_json::from_str::<Vec<&RawValue>>(&items).map_err(|_| RejectReason::Unreadable)?;
    Ok(Payload {
        response_id: verified.response_id,
        issued_s: verified.issued_s,
        items,
    })
}

/// A token's text, split at its dots. Only the MAC is decoded.
struct Parts<'a> {
    key_id: &'a str,
    header: &'a str,
    body: &'a str,
    mac: [u8; MAC_BYTES],
    /// The text that the MAC covers.
    signed: &'a str,
}

impl<'a> Parts<'a> {
    fn split(text: &'a str) -> Option<Self> {
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
