//! Why a token is not accepted. The messages say what is wrong and repeat nothing of the token.

use std::fmt;

use super::settings::Algorithm;

/// Why a token is not accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rejection {
    /// It is no JWT at all.
    Malformed,
    /// Signed with an algorithm that is not accepted, with a shared secret, or not at all.
    Algorithm {
        accepted: Vec<Algorithm>,
    },
    /// It has headers that a verifier must understand.
    Critical,
    /// `iss` names no issuer of the configuration.
    Issuer,
    /// The issuer has no key of this id (or no key that fits).
    UnknownKey,
    /// The issuer's keys were never read.
    NoKeys,
    Signature,
    Expired,
    NotYetValid,
    Audience,
    /// A claim that is needed is missing or no text or number as it should be.
    Claim(String),
    /// The claim names a tenant that is not known here.
    Tenant {
        claim: String,
    },
}

impl Rejection {
    /// For metrics.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Malformed => "malformed",
            Self::Algorithm { .. } => "algorithm",
            Self::Critical => "critical_header",
            Self::Issuer => "issuer",
            Self::UnknownKey => "unknown_key",
            Self::NoKeys => "no_keys",
            Self::Signature => "signature",
            Self::Expired => "expired",
            Self::NotYetValid => "not_yet_valid",
            Self::Audience => "audience",
            Self::Claim(_) => "claim",
            Self::Tenant { .. } => "tenant",
        }
    }
}

impl fmt::Display for Rejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Malformed => f.write_str("incorrect API key, and no valid JSON Web Token either"),
            Self::Algorithm { accepted } => {
                f.write_str("the token is not signed with an accepted algorithm (")?;
                for (index, algorithm) in accepted.iter().enumerate() {
                    let comma = if index == 0 { "" } else { ", " };
                    write!(f, "{comma}{}", algorithm.name())?;
                }
                f.write_str(")")
            }
            Self::Critical => f.write_str("the token has a header `crit`, which is not supported"),
            Self::Issuer => f.write_str("the token's issuer (`iss`) is not accepted here"),
            Self::UnknownKey => {
                f.write_str("the token's key (`kid`) is not among the public keys of its issuer")
            }
            Self::NoKeys => f.write_str(
                "the token cannot be verified: the public keys of its issuer could not be read yet; try again",
            ),
            Self::Signature => f.write_str("the token's signature is wrong"),
            Self::Expired => f.write_str("the token has expired (`exp`); get a new one"),
            Self::NotYetValid => f.write_str("the token is not valid yet (`nbf`)"),
            Self::Audience => f.write_str("the token was issued for another audience (`aud`)"),
            Self::Claim(claim) => {
                write!(f, "the token's claim `{claim}` is missing or has the wrong type")
            }
            Self::Tenant { claim } => {
                write!(f, "the tenant that the token's claim `{claim}` names is not known here")
            }
        }
    }
}
