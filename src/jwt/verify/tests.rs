//! Claims, algorithms and keys as tables.

use ring::rand::SystemRandom;
use ring::signature::{
    ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair, KeyPair as _,
};
use serde_json::json;

use super::*;
use crate::jwt::ring_signatures;
use crate::observe;

const ISSUER: &str = "https://issuer.example";
const LEEWAY_S: u64 = 60;

/// A public key with its signatures by RS256 and PS256, made once; they expire in 2100.
const RSA_N: &str = "wTY_QfzswOFJli5ixsb-sa4LJ1f1obTSLDO7riRBiwtoeMkbeV8vpSrfqNg4XLRsXcQcNswbSjagC4MDf2z9rFqx96DGFIUdbgmRLExh9LenCk3x1UtQ7zhJVXuWOINqFzgSdHgNGbiBntpPR0sBK2qEVVo1bYCShJE4Wo9eBYeZJcYzbJailDmoExLmuArPh-D8k_UDMYFxY1JdbAJRTw6JBZr467hnViwB1aW4nxeMC7PcSs4xJ6n9pFcolAWYECueF5pSMgyO5UjfTgVCiRKsiWxVWqtKOY7KHH8uAaEvHeCXB3OkOWJt13Dp0-owMpmhagmef3PTlEF8lfmP2w";
const RS256: &str = "eyJhbGciOiJSUzI1NiIsInR5cCI6IkpXVCIsImtpZCI6InJzYSJ9.eyJpc3MiOiJodHRwczovL2lzc3Vlci5leGFtcGxlIiwiYXVkIjoid2FybXJvdXRlIiwiZXhwIjo0MTAyNDQ0ODAwLCJ0ZW5hbnQiOiJhY21lIn0.BbJ-C1lnzWiVF1ZaCXewVUoCTpYaa0YSCuFUMVKooofQjPQhr8hrKGcZ8ahK_lAPx1K3xbGG7Yy8c54N2Luv2gx_pcg2RhwisdIkRKIEec8XfT-X1px0Z2U4Sw9iOt9r5jlRwuOJf3rnM350lD25LjtaHVIlI67er5-HXr_ClS5gnH0jM1LENvq_dQu0iI_9Lavoun7-T1UQ-YaG591HvWH0l1kwO3_uRSaFqsi_ZFkOfa6kSSbBZ83_Jn7FD0iSWSdVozCZaCyAjUFLVdkYvjsLbBzLtTmFjPZVG6zR-eCohszZGM0dVB9FJUpCI2k_LDqb3rw8aiutRGY87BvfxA";
const PS256: &str = "eyJhbGciOiJQUzI1NiIsInR5cCI6IkpXVCIsImtpZCI6InJzYSJ9.eyJpc3MiOiJodHRwczovL2lzc3Vlci5leGFtcGxlIiwiYXVkIjoid2FybXJvdXRlIiwiZXhwIjo0MTAyNDQ0ODAwLCJ0ZW5hbnQiOiJhY21lIn0.ufECIa3m5R1aDkbQDoA099pnyTiGYYfIsigpwmniBT4mug-nUzocmWt77dbcHXEivZSOh5aa-cIOU9GgMsQITPhMmaEHoQT-V0gZQtrUFOHckbEa9lNI6YLba1eKACisltkpEjBTqFbUTC90n0awBPzxvYvmQlwgoyPl5EzAE67Y2PO4tfTbiEQ4mrMLZkHFCmOwPIfbdblr9lmOJpzgnaxyKMwntRaGXr2jieH5aS5Chz40kWxPtxvy5yYJbxC9SEkP8XR1P6saZQaIR3vc98uu6UG8ixlnmY_Ao7cKVSryuUdvKkZeQs4Dt1r1lTC47KY7gkKBFJYyHlcLiauusw";

fn encode(bytes: impl AsRef<[u8]>) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}

/// The keys of one issuer: P-256 and Ed25519.
struct Signer {
    ec: EcdsaKeyPair,
    ed: Ed25519KeyPair,
    random: SystemRandom,
}

impl Signer {
    fn new() -> Self {
        ring_signatures::install();
        let random = SystemRandom::new();
        let by = &ECDSA_P256_SHA256_FIXED_SIGNING;
        let ec = EcdsaKeyPair::generate_pkcs8(by, &random).unwrap();
        let ed = Ed25519KeyPair::generate_pkcs8(&random).unwrap();
        Self {
            ec: EcdsaKeyPair::from_pkcs8(by, ec.as_ref(), &random).unwrap(),
            ed: Ed25519KeyPair::from_pkcs8(ed.as_ref()).unwrap(),
            random,
        }
    }

    fn ec_jwk(&self) -> Value {
        let point = &self.ec.public_key().as_ref()[1..];
        let (x, y) = point.split_at(32);
        json!({"kty": "EC", "crv": "P-256", "kid": "ec", "x": encode(x), "y": encode(y)})
    }

    fn ed_jwk(&self) -> Value {
        let x = encode(self.ed.public_key().as_ref());
        json!({"kty": "OKP", "crv": "Ed25519", "kid": "ed", "x": x})
    }

    fn keys(&self) -> KeySet {
        let rsa = json!({"kty": "RSA", "kid": "rsa", "use": "sig", "n": RSA_N, "e": "AQAB"});
        set(&[self.ec_jwk(), self.ed_jwk(), rsa])
    }

    fn token(&self, header: &Value, claims: &Value) -> String {
        let message = format!(
            "{}.{}",
            encode(header.to_string()),
            encode(claims.to_string())
        );
        let signature = match header["alg"].as_str() {
            Some("EdDSA") => self.ed.sign(message.as_bytes()).as_ref().to_vec(),
            _ => {
                let signed = self.ec.sign(&self.random, message.as_bytes()).unwrap();
                signed.as_ref().to_vec()
            }
        };
        format!("{message}.{}", encode(signature))
    }
}

fn set(keys: &[Value]) -> KeySet {
    KeySet::parse(json!({ "keys": keys }).to_string().as_bytes()).unwrap()
}

fn issuer() -> IssuerSettings {
    IssuerSettings {
        issuer: ISSUER.to_owned(),
        audiences: vec!["warmroute".to_owned(), "other".to_owned()],
        ..IssuerSettings::default()
    }
}

fn result(token: &str, issuer: &IssuerSettings, keys: &KeySet) -> Result<String, Rejection> {
    let said = read(token)?;
    verify(token, &said, issuer, LEEWAY_S, keys).map(|accepted| accepted.tenant)
}

/// Claims that are accepted, with those of `change` instead; null takes one out.
fn claims(change: &Value) -> Value {
    let mut claims = json!({"iss": ISSUER, "aud": "warmroute", "exp": observe::unix_s() + 300, "tenant": "acme"});
    for (name, value) in change.as_object().unwrap() {
        match value {
            Value::Null => claims.as_object_mut().unwrap().remove(name),
            value => claims
                .as_object_mut()
                .unwrap()
                .insert(name.clone(), value.clone()),
        };
    }
    claims
}

fn ec() -> Value {
    json!({"alg": "ES256", "kid": "ec"})
}

fn not_accepted() -> Rejection {
    Rejection::Algorithm {
        accepted: Algorithm::ALL.to_vec(),
    }
}

#[test]
fn claims_decide_whether_a_token_is_accepted() {
    let (signer, now) = (Signer::new(), observe::unix_s());
    let claim = |name: &str| Rejection::Claim(name.to_owned());
    let cases = [
        (json!({}), Ok("acme")),
        (json!({"aud": ["a", "other"]}), Ok("acme")),
        (json!({"aud": "another service"}), Err(Rejection::Audience)),
        (json!({"aud": null}), Err(Rejection::Audience)),
        (json!({"aud": 5}), Err(Rejection::Audience)),
        (json!({"exp": now - 30}), Ok("acme")),
        (json!({"exp": (now + 30) as f64 + 0.5}), Ok("acme")),
        (json!({"exp": now - 90}), Err(Rejection::Expired)),
        (json!({"exp": null}), Err(claim("exp"))),
        (json!({"exp": "tomorrow"}), Err(claim("exp"))),
        (json!({"exp": true}), Err(claim("exp"))),
        (json!({"exp": -1}), Err(claim("exp"))),
        (json!({"nbf": now + 30}), Ok("acme")),
        (json!({"nbf": now + 90}), Err(Rejection::NotYetValid)),
        (json!({"nbf": "now"}), Err(claim("nbf"))),
        (
            json!({"iss": "https://other.example"}),
            Err(Rejection::Issuer),
        ),
        (json!({"iss": format!("{ISSUER}/")}), Err(Rejection::Issuer)),
        (json!({"iss": null}), Err(Rejection::Issuer)),
        (json!({"iss": [ISSUER]}), Err(Rejection::Issuer)),
        (json!({"tenant": ["acme"]}), Ok("acme")),
        (json!({"tenant": ["acme", "b"]}), Err(claim("tenant"))),
        (json!({"tenant": null}), Err(claim("tenant"))),
        (json!({"tenant": ""}), Err(claim("tenant"))),
        (json!({"tenant": 7}), Err(claim("tenant"))),
        (json!({"tenant": "x".repeat(257)}), Err(claim("tenant"))),
    ];
    for (change, expected) in cases {
        let token = signer.token(&ec(), &claims(&change));
        let found = result(&token, &issuer(), &signer.keys());
        assert_eq!(found, expected.map(str::to_owned), "{change}");
    }
}

#[test]
fn the_claim_of_the_tenant_may_have_any_name_and_lie_inside_others() {
    let signer = Signer::new();
    let change = json!({"tenant": null, "https://a.example/team": "a", "kubernetes.io": {"namespace": "b", "x/y": "c"}});
    let token = signer.token(&ec(), &claims(&change));
    let of = |claim: &str| {
        let issuer = IssuerSettings {
            tenant_claim: claim.to_owned(),
            ..issuer()
        };
        result(&token, &issuer, &signer.keys()).ok()
    };
    assert_eq!(of("https://a.example/team").as_deref(), Some("a"));
    assert_eq!(of("/kubernetes.io/namespace").as_deref(), Some("b"));
    assert_eq!(of("/kubernetes.io/x~1y").as_deref(), Some("c"));
    assert_eq!(of("/kubernetes.io/none"), None);
    assert_eq!(of("kubernetes.io"), None);
    assert_eq!(of("/"), None);
}

#[test]
fn every_audience_is_accepted_only_where_that_is_asked_for() {
    let signer = Signer::new();
    let any = IssuerSettings {
        audiences: vec!["*".to_owned()],
        ..issuer()
    };
    for change in [
        json!({"aud": "x"}),
        json!({"aud": null}),
        json!({"aud": ["x", "y"]}),
    ] {
        let token = signer.token(&ec(), &claims(&change));
        assert_eq!(result(&token, &any, &signer.keys()).unwrap(), "acme");
        assert!(result(&token, &issuer(), &signer.keys()).is_err());
    }
}

#[test]
fn each_kind_of_key_verifies_its_own_algorithms() {
    let signer = Signer::new();
    let ed = signer.token(&json!({"alg": "EdDSA", "kid": "ed"}), &claims(&json!({})));
    let without_id = signer.token(&json!({"alg": "ES256"}), &claims(&json!({})));
    for token in [RS256, PS256, &ed, &without_id] {
        let found = result(token, &issuer(), &signer.keys());
        assert_eq!(found.as_deref(), Ok("acme"), "{token}");
        // One bit of the signature.
        let broken = format!(
            "{}A{}",
            &token[..token.len() - 40],
            &token[token.len() - 39..]
        );
        if broken != token {
            assert!(result(&broken, &issuer(), &signer.keys()).is_err());
        }
    }
    // Another signature over other claims.
    let other = signer.token(&ec(), &claims(&json!({"tenant": "b"})));
    let (message, _) = without_id.rsplit_once('.').unwrap();
    let (_, signature) = other.rsplit_once('.').unwrap();
    let forged = format!(
        "{}.{signature}",
        message.replacen(&encode(r#"{"alg":"ES256"}"#), &encode(ec().to_string()), 1)
    );
    assert_eq!(
        result(&forged, &issuer(), &signer.keys()),
        Err(Rejection::Signature)
    );
}

#[test]
fn unsigned_tokens_and_shared_secrets_are_refused_whatever_the_key() {
    use hmac::{Hmac, KeyInit as _, Mac as _};
    let signer = Signer::new();
    let message = |header: &Value| {
        format!(
            "{}.{}",
            encode(header.to_string()),
            encode(claims(&json!({})).to_string())
        )
    };
    for alg in [
        "none", "None", "NONE", "", "HS256", "HS512", "ES512", "RSA-OAEP", "rs256",
    ] {
        for kid in ["ec", "rsa", "oct"] {
            let text = message(&json!({"alg": alg, "kid": kid}));
            // With the public key as the secret, in its forms.
            for secret in [
                RSA_N.as_bytes(),
                signer.ec.public_key().as_ref(),
                b"",
                b"secret",
            ] {
                let mut mac = Hmac::<sha2::Sha256>::new_from_slice(secret).unwrap();
                mac.update(text.as_bytes());
                let token = format!("{text}.{}", encode(mac.finalize().into_bytes()));
                let mut keys = vec![signer.ec_jwk(), signer.ed_jwk()];
                keys.push(json!({"kty": "oct", "kid": "oct", "k": encode(secret), "alg": "HS256"}));
                assert_eq!(
                    result(&token, &issuer(), &set(&keys)),
                    Err(not_accepted()),
                    "{alg}"
                );
            }
            let unsigned = format!("{text}.");
            assert_eq!(
                result(&unsigned, &issuer(), &signer.keys()),
                Err(not_accepted())
            );
        }
    }
}

#[test]
fn only_listed_algorithms_are_accepted() {
    let signer = Signer::new();
    let only = IssuerSettings {
        algorithms: vec![Algorithm::PS256],
        ..issuer()
    };
    assert_eq!(result(PS256, &only, &signer.keys()).unwrap(), "acme");
    let error = result(RS256, &only, &signer.keys()).unwrap_err();
    assert!(error.to_string().contains("(PS256)"), "{error}");
}

#[test]
fn a_key_is_used_only_for_what_it_is_for() {
    let signer = Signer::new();
    let token = signer.token(&ec(), &claims(&json!({})));
    let with = |change: Value| {
        let mut key = signer.ec_jwk();
        key.as_object_mut()
            .unwrap()
            .extend(change.as_object().unwrap().clone());
        set(&[key, signer.ed_jwk()])
    };
    for accepted in [
        json!({"alg": "ES256"}),
        json!({"use": "sig"}),
        json!({"key_ops": ["verify"]}),
        json!({"x5t": "abc", "unknown": {"a": 1}}),
    ] {
        let keys = with(accepted.clone());
        assert_eq!(
            result(&token, &issuer(), &keys).as_deref(),
            Ok("acme"),
            "{accepted}"
        );
    }
    for refused in [
        json!({"alg": "ES384"}),
        json!({"alg": "HS256"}),
        json!({"alg": "made-up"}),
        json!({"use": "enc"}),
        json!({"key_ops": ["encrypt"]}),
        json!({"kid": "another"}),
        json!({"crv": "P-384"}),
        json!({"kty": "RSA"}),
        json!({"x": null}),
    ] {
        let keys = with(refused.clone());
        let found = result(&token, &issuer(), &keys);
        assert_eq!(found, Err(Rejection::UnknownKey), "{refused}");
    }
    // A key that names no id may be any.
    let mut key = signer.ec_jwk();
    key.as_object_mut().unwrap().remove("kid");
    assert_eq!(
        result(&token, &issuer(), &set(&[key])).as_deref(),
        Ok("acme")
    );
}

#[test]
fn a_key_set_without_a_usable_key_is_an_error() {
    for (text, expected) in [
        ("", "is no JSON Web Key Set"),
        ("[]", "is no JSON Web Key Set"),
        (r#"{"keys": 1}"#, "is no JSON Web Key Set"),
        (r#"{"keys": []}"#, "of 0 keys none"),
        (
            r#"{"keys": [{"kty": "oct", "k": "c2VjcmV0"}, 5, null]}"#,
            "of 3 keys none",
        ),
    ] {
        let error = KeySet::parse(text.as_bytes()).unwrap_err();
        assert!(error.contains(expected), "{text}: {error}");
        assert!(!error.contains("c2VjcmV0"), "{error}");
    }
    let many = vec![json!({"kty": "oct", "k": "c2VjcmV0"}); 101];
    let error = KeySet::parse(json!({"keys": many}).to_string().as_bytes()).unwrap_err();
    assert!(error.contains("up to 100"), "{error}");
}

#[test]
fn what_is_no_token_is_refused_without_a_panic() {
    let signer = Signer::new();
    let token = signer.token(&ec(), &claims(&json!({})));
    let critical = signer.token(
        &json!({"alg": "ES256", "kid": "ec", "crit": ["b64"]}),
        &claims(&json!({})),
    );
    assert_eq!(
        result(&critical, &issuer(), &signer.keys()),
        Err(Rejection::Critical)
    );
    for end in 0..token.len() {
        assert!(result(&token[..end], &issuer(), &signer.keys()).is_err());
    }
    let long = signer.token(&ec(), &claims(&json!({"groups": "x".repeat(20_000)})));
    let padded = format!("{token}=");
    for wrong in [
        "",
        "..",
        "a.b.c",
        "....",
        "e30.e30.e30",
        &long,
        &padded,
        &format!("{token}.x"),
    ] {
        assert!(result(wrong, &issuer(), &signer.keys()).is_err(), "{wrong}");
    }
}
