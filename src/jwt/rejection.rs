//! Why a token is not accepted. The messages say what is wrong and repeat nothing of the token.

use super::settings::Algorithm;

/// Why a token is not accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Rejection {
    #[error("incorrect API key, and no valid JSON Web Token either")]
    Malformed,
    /// Signed with an algorithm that is not accepted, with a shared secret, or not at all.
    #[error("the token is not signed with an accepted algorithm ({})", names(.accepted))]
    Algorithm { accepted: Vec<Algorithm> },
    /// It has headers that a verifier must understand.
    #[error("the token has a header `crit`, which is not supported")]
    Critical,
    #[error("the token's issuer (`iss`) is not accepted here")]
    Issuer,
    /// The issuer has no key of this id (or no key that fits).
    #[error("the token's key (`kid`) is not among the public keys of its issuer")]
    UnknownKey,
    #[error(
        "the token cannot be verified: the public keys of its issuer could not be read yet; try again"
    )]
    NoKeys,
    /// The issuer may have published its key since its keys were last read.
    #[error(
        "the token's key (`kid`) is not known yet, and the public keys of its issuer cannot be read now; try again"
    )]
    StaleKeys,
    #[error("the token's signature is wrong")]
    Signature,
    #[error("the token has expired (`exp`); get a new one")]
    Expired,
    #[error("the token is not valid yet (`nbf`)")]
    NotYetValid,
    #[error("the token was issued for another audience (`aud`)")]
    Audience,
    #[error("the token's claim `{0}` is missing or has the wrong type")]
    Claim(String),
    #[error("the tenant that the token's claim `{claim}` names is not known here")]
    Tenant { claim: String },
}

fn names(algorithms: &[Algorithm]) -> String {
    let names = algorithms.iter().map(|algorithm| algorithm.as_str());
    names.collect::<Vec<_>>().join(", ")
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
            Self::StaleKeys => "stale_keys",
            Self::Signature => "signature",
            Self::Expired => "expired",
            Self::NotYetValid => "not_yet_valid",
            Self::Audience => "audience",
            Self::Claim(_) => "claim",
            Self::Tenant { .. } => "tenant",
        }
    }
}
