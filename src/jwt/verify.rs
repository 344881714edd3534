//! A token and its issuer's keys -> the tenant that it names, or why it is not accepted. No I/O; the library reads the
//! clock.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jsonwebtoken::errors::ErrorKind;
use jsonwebtoken::{DecodingKey, Validation, decode};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;

use super::key_set::KeySet;
use super::rejection::Rejection;
use super::settings::{Algorithm, IssuerSettings};

/// Longer ones are refused unread. Tokens with all groups of a user have some kilobytes.
const MAX_BYTES: usize = 16 << 10;

/// Stands for every audience.
const ANY_AUDIENCE: &str = "*";

/// A tenant's name as a token may have it.
const MAX_TENANT_BYTES: usize = 256;

/// What a token says of itself, not verified.
#[derive(Debug)]
pub(super) struct Unverified {
    algorithm: String,
    key_id: Option<String>,
    has_critical: bool,
    pub(super) issuer: String,
    /// `exp`, seconds since 1970.
    pub(super) expires: Option<f64>,
}

#[derive(Deserialize)]
struct Header {
    alg: String,
    #[serde(default)]
    kid: Option<String>,
    #[serde(default)]
    crit: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct Claims {
    #[serde(default)]
    iss: Value,
    #[serde(default)]
    exp: Value,
}

/// Reads what is needed to find the issuer and its key.
pub(super) fn read(token: &str) -> Result<Unverified, Rejection> {
    fn part<T: for<'de> Deserialize<'de>>(text: Option<&str>) -> Option<T> {
        let json = URL_SAFE_NO_PAD.decode(text?).ok()?;
        serde_json::from_slice(&json).ok()
    }
    let mut parts = token.split('.');
    let header = part::<Header>(parts.next()).ok_or(Rejection::Malformed)?;
    let claims = part::<Claims>(parts.next()).ok_or(Rejection::Malformed)?;
    if token.len() > MAX_BYTES || parts.next().is_none() || parts.next().is_some() {
        return Err(Rejection::Malformed);
    }
    let Value::String(issuer) = claims.iss else {
        return Err(Rejection::Issuer);
    };
    Ok(Unverified {
        algorithm: header.alg,
        key_id: header.kid,
        has_critical: header.crit.is_some(),
        issuer,
        expires: claims.exp.as_f64(),
    })
}

/// What a verified token says.
#[derive(Debug, PartialEq)]
pub(super) struct Accepted {
    pub(super) tenant: String,
    /// `exp`, seconds since 1970.
    pub(super) expires: f64,
}

/// Verifies a token that says it is of this issuer.
pub(super) fn verify(
    token: &str,
    said: &Unverified,
    issuer: &IssuerSettings,
    leeway_s: u64,
    keys: &KeySet,
) -> Result<Accepted, Rejection> {
    let accepted = issuer.algorithms.iter().copied();
    let algorithm = accepted
        .into_iter()
        .find(|algorithm| algorithm.as_str() == said.algorithm)
        .ok_or_else(|| Rejection::Algorithm {
            accepted: issuer.algorithms.clone(),
        })?;
    if said.has_critical {
        return Err(Rejection::Critical);
    }
    let validation = validation(algorithm, issuer, leeway_s);
    let mut rejection = Rejection::UnknownKey;
    for key in keys.candidates(said.key_id.as_deref(), algorithm) {
        match with_key(token, key, &validation) {
            Ok(claims) => return accept(&claims, issuer),
            Err(Rejection::Signature) if said.key_id.is_none() => {}
            // Of several keys with one id another may have signed it.
            Err(Rejection::Signature) => rejection = Rejection::Signature,
            Err(other) => return Err(other),
        }
    }
    Err(rejection)
}

fn validation(algorithm: Algorithm, issuer: &IssuerSettings, leeway_s: u64) -> Validation {
    let mut validation = Validation::new(algorithm.library());
    validation.leeway = leeway_s;
    validation.validate_exp = true;
    validation.validate_nbf = true;
    validation.set_issuer(&[&issuer.issuer]);
    if issuer
        .audiences
        .iter()
        .any(|audience| audience == ANY_AUDIENCE)
    {
        validation.validate_aud = false;
        validation.set_required_spec_claims(&["exp", "iss"]);
    } else {
        validation.set_audience(&issuer.audiences);
        validation.set_required_spec_claims(&["exp", "iss", "aud"]);
    }
    validation
}

fn with_key(token: &str, key: &DecodingKey, validation: &Validation) -> Result<Value, Rejection> {
    let decoded = decode::<Value>(token, key, validation);
    let error = match decoded {
        Ok(decoded) => return Ok(decoded.claims),
        Err(error) => error,
    };
    Err(match error.into_kind() {
        ErrorKind::ExpiredSignature => Rejection::Expired,
        ErrorKind::ImmatureSignature => Rejection::NotYetValid,
        ErrorKind::InvalidAudience => Rejection::Audience,
        ErrorKind::InvalidIssuer => Rejection::Issuer,
        // Its own names of claims.
        ErrorKind::MissingRequiredClaim(claim) | ErrorKind::InvalidClaimFormat(claim) => {
            match claim.as_str() {
                "aud" => Rejection::Audience,
                _ => Rejection::Claim(claim),
            }
        }
        ErrorKind::InvalidToken | ErrorKind::Json(_) | ErrorKind::Utf8(_) => Rejection::Malformed,
        _ => Rejection::Signature,
    })
}

fn accept(claims: &Value, issuer: &IssuerSettings) -> Result<Accepted, Rejection> {
    let missing = |claim: &str| Rejection::Claim(claim.to_owned());
    let expires = claims.get("exp").and_then(Value::as_f64);
    let claim = &issuer.tenant_claim;
    let tenant = if claim.starts_with('/') {
        claims.pointer(claim)
    } else {
        claims.get(claim)
    };
    let tenant = match tenant {
        Some(Value::String(name)) => Some(name),
        // Of several it would be a guess.
        Some(Value::Array(names)) => match &**names {
            [Value::String(name)] => Some(name),
            _ => None,
        },
        _ => None,
    };
    let tenant = tenant.filter(|name| !name.is_empty() && name.len() <= MAX_TENANT_BYTES);
    Ok(Accepted {
        tenant: tenant.ok_or_else(|| missing(claim))?.clone(),
        expires: expires.ok_or_else(|| missing("exp"))?,
    })
}

#[cfg(test)]
mod tests;
