//! An issuer of tokens: its keys, and the server that publishes them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use hmac::{Hmac, KeyInit as _, Mac as _};
use parking_lot::Mutex;
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair as _};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use warmroute::observe;

pub(super) const ISSUER: &str = "https://issuer.example";

fn encode(bytes: impl AsRef<[u8]>) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}

/// One key of the issuer.
pub(super) struct Signer {
    id: String,
    pair: EcdsaKeyPair,
    random: SystemRandom,
}

impl Signer {
    pub(super) fn new(id: &str) -> Self {
        let random = SystemRandom::new();
        let by = &ECDSA_P256_SHA256_FIXED_SIGNING;
        let pair = EcdsaKeyPair::generate_pkcs8(by, &random).unwrap();
        Self {
            id: id.to_owned(),
            pair: EcdsaKeyPair::from_pkcs8(by, pair.as_ref(), &random).unwrap(),
            random,
        }
    }

    /// The key set with its public key.
    pub(super) fn keys(&self) -> String {
        let (x, y) = self.pair.public_key().as_ref()[1..].split_at(32);
        let key = json!({"kty": "EC", "crv": "P-256", "use": "sig", "alg": "ES256", "kid": self.id,
            "x": encode(x), "y": encode(y)});
        json!({ "keys": [key] }).to_string()
    }

    fn message(&self, algorithm: &str, change: &Value) -> String {
        let header = json!({"alg": algorithm, "typ": "JWT", "kid": self.id});
        let mut claims = json!({"iss": ISSUER, "aud": "warmroute", "exp": observe::unix_s() + 600});
        let change = change.as_object().unwrap().clone();
        claims.as_object_mut().unwrap().extend(change);
        format!(
            "{}.{}",
            encode(header.to_string()),
            encode(claims.to_string())
        )
    }

    pub(super) fn token(&self, claims: &Value) -> String {
        let message = self.message("ES256", claims);
        let signature = self.pair.sign(&self.random, message.as_bytes()).unwrap();
        format!("{message}.{}", encode(signature))
    }

    pub(super) fn unsigned(&self, claims: &Value) -> String {
        format!("{}.", self.message("none", claims))
    }

    pub(super) fn with_public_key_as_secret(&self, claims: &Value) -> String {
        let message = self.message("HS256", claims);
        let secret = self.pair.public_key().as_ref();
        let mut mac = Hmac::<sha2::Sha256>::new_from_slice(secret).unwrap();
        mac.update(message.as_bytes());
        format!("{message}.{}", encode(mac.finalize().into_bytes()))
    }
}

/// A web server with one page.
pub(super) struct KeyServer {
    address: SocketAddr,
    page: Arc<Mutex<(u16, String)>>,
    requests: Arc<AtomicUsize>,
}

impl KeyServer {
    pub(super) async fn start(keys: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = Self {
            address: listener.local_addr().unwrap(),
            page: Arc::new(Mutex::new((200, keys.to_owned()))),
            requests: Arc::default(),
        };
        let (page, requests) = (server.page.clone(), server.requests.clone());
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    let mut byte = [0];
                    if stream.read_exact(&mut byte).await.is_err() {
                        break;
                    }
                    head.push(byte[0]);
                }
                let (status, body) = page.lock().clone();
                let answer = format!(
                    "HTTP/1.1 {status} X\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
                    body.len()
                );
                let _ = stream.write_all(answer.as_bytes()).await;
                requests.fetch_add(1, Relaxed);
            }
        });
        server
    }

    pub(super) fn url(&self) -> String {
        format!("http://{}/keys", self.address)
    }

    /// What it answers from now on.
    pub(super) fn publish(&self, status: u16, body: &str) {
        *self.page.lock() = (status, body.to_owned());
    }

    /// How many requests it has answered.
    pub(super) fn requests(&self) -> usize {
        self.requests.load(Relaxed)
    }
}
