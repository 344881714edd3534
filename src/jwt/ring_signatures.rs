//! Verifies the signatures of tokens with ring, which TLS uses already.

use jsonwebtoken::crypto::{CryptoProvider, JwkUtils, JwtVerifier};
use jsonwebtoken::errors::{ErrorKind, Result, new_error};
use jsonwebtoken::signature::{Error, Verifier};
use jsonwebtoken::{Algorithm, AlgorithmFamily, DecodingKey, DecodingKeyKind};
use ring::signature::{
    ECDSA_P256_SHA256_FIXED, ECDSA_P384_SHA384_FIXED, ED25519, RSA_PKCS1_2048_8192_SHA256,
    RSA_PKCS1_2048_8192_SHA384, RSA_PKCS1_2048_8192_SHA512, RSA_PSS_2048_8192_SHA256,
    RSA_PSS_2048_8192_SHA384, RSA_PSS_2048_8192_SHA512, RsaParameters, RsaPublicKeyComponents,
    UnparsedPublicKey, VerificationAlgorithm,
};

/// Tokens are never signed here, and keys never derived.
static PROVIDER: CryptoProvider = CryptoProvider {
    signer_factory: |_, _| Err(new_error(ErrorKind::InvalidAlgorithm)),
    verifier_factory: verifier,
    jwk_utils: JwkUtils::new_unimplemented(),
};

/// Makes the library use ring, in this process.
pub(super) fn install() {
    // Fails if it was installed before.
    let _ = PROVIDER.install_default();
}

fn verifier(algorithm: &Algorithm, key: &DecodingKey) -> Result<Box<dyn JwtVerifier>> {
    let family = match algorithm {
        Algorithm::ES256 | Algorithm::ES384 => AlgorithmFamily::Ec,
        Algorithm::EdDSA => AlgorithmFamily::Ed,
        Algorithm::HS256 | Algorithm::HS384 | Algorithm::HS512 => {
            return Err(new_error(ErrorKind::InvalidAlgorithm));
        }
        _ => AlgorithmFamily::Rsa,
    };
    if family != key.family() {
        return Err(new_error(ErrorKind::InvalidAlgorithm));
    }
    Ok(Box::new(RingVerifier {
        algorithm: *algorithm,
        key: key.clone(),
    }))
}

struct RingVerifier {
    algorithm: Algorithm,
    key: DecodingKey,
}

impl RingVerifier {
    fn rsa(&self, by: &'static RsaParameters, message: &[u8], signature: &[u8]) -> Option<()> {
        let DecodingKeyKind::RsaModulusExponent { n, e } = self.key.kind() else {
            return None;
        };
        // Some issuers write a zero before a number whose first bit is set, as in ASN.1.
        let bare = |number: &[u8]| {
            let zeros = number.iter().take_while(|byte| **byte == 0).count();
            number[zeros..].to_vec()
        };
        let key = RsaPublicKeyComponents {
            n: bare(n),
            e: bare(e),
        };
        key.verify(by, message, signature).ok()
    }

    fn point(
        &self,
        by: &'static dyn VerificationAlgorithm,
        message: &[u8],
        signature: &[u8],
    ) -> Option<()> {
        let DecodingKeyKind::SecretOrDer(key) = self.key.kind() else {
            return None;
        };
        UnparsedPublicKey::new(by, key)
            .verify(message, signature)
            .ok()
    }
}

impl Verifier<Vec<u8>> for RingVerifier {
    fn verify(&self, message: &[u8], signature: &Vec<u8>) -> std::result::Result<(), Error> {
        let (rsa, point) = (
            |by| self.rsa(by, message, signature),
            |by| self.point(by, message, signature),
        );
        let verified = match self.algorithm {
            Algorithm::RS256 => rsa(&RSA_PKCS1_2048_8192_SHA256),
            Algorithm::RS384 => rsa(&RSA_PKCS1_2048_8192_SHA384),
            Algorithm::RS512 => rsa(&RSA_PKCS1_2048_8192_SHA512),
            Algorithm::PS256 => rsa(&RSA_PSS_2048_8192_SHA256),
            Algorithm::PS384 => rsa(&RSA_PSS_2048_8192_SHA384),
            Algorithm::PS512 => rsa(&RSA_PSS_2048_8192_SHA512),
            Algorithm::ES256 => point(&ECDSA_P256_SHA256_FIXED),
            Algorithm::ES384 => point(&ECDSA_P384_SHA384_FIXED),
            Algorithm::EdDSA => point(&ED25519),
            // Shared secrets.
            _ => None,
        };
        verified.ok_or_else(Error::new)
    }
}

impl JwtVerifier for RingVerifier {
    fn algorithm(&self) -> Algorithm {
        self.algorithm
    }
}
