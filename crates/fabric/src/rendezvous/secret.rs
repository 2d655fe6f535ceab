//! Proving that one knows the secret without showing it.
//!
//! Both sides prove that they know the secret: other processes can neither join a world nor, by listening in place of rank 0, learn the
//! secret or hand out memory of its own.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use super::frame::{Card, Nonce, Proof};

/// The secret of a world, which only its ranks know.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Vec<u8>);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(..)")
    }
}

impl Secret {
    /// The secret of these bytes.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Self {
        Self(bytes.into())
    }

    /// A fresh random secret.
    pub fn random() -> Self {
        Self(random_hex().into_bytes())
    }

    /// As text, to be passed to ranks in a private way (an environment variable, a caller's own exchange).
    pub fn expose(&self) -> String {
        String::from_utf8_lossy(&self.0).into_owned()
    }

    /// The joiner's proof.
    pub(super) fn prove_join(&self, theirs: &Nonce, mine: &Nonce, card: &Card) -> Proof {
        hex(&self.mac("join", theirs, mine, card).finalize().into_bytes())
    }

    pub(super) fn verify_join(&self, mine: &Nonce, theirs: &Nonce, card: &Card, proof: &Proof) -> bool {
        // The comparison takes the same time for every wrong proof.
        unhex(proof).is_some_and(|p| self.mac("join", mine, theirs, card).verify_slice(&p).is_ok())
    }

    /// Rank 0's proof that it is rank 0.
    pub(super) fn prove_root(&self, mine: &Nonce, theirs: &Nonce) -> Proof {
        hex(&self.mac("root", mine, theirs, &()).finalize().into_bytes())
    }

    pub(super) fn verify_root(&self, theirs: &Nonce, mine: &Nonce, proof: &Proof) -> bool {
        unhex(proof).is_some_and(|p| self.mac("root", theirs, mine, &()).verify_slice(&p).is_ok())
    }

    /// Rank 0's proof, over the cards, the ranks whose handles it sends and what it has drawn.
    pub(super) fn prove_welcome(
        &self,
        mine: &Nonce,
        theirs: &Nonce,
        said: (&[Card], &[usize], &Nonce),
    ) -> Proof {
        hex(&self.mac("welcome", mine, theirs, &said).finalize().into_bytes())
    }

    pub(super) fn verify_welcome(
        &self,
        theirs: &Nonce,
        mine: &Nonce,
        said: (&[Card], &[usize], &Nonce),
        proof: &Proof,
    ) -> bool {
        unhex(proof).is_some_and(|p| self.mac("welcome", theirs, mine, &said).verify_slice(&p).is_ok())
    }

    /// A word that only the ranks know which have these cards and met when rank 0 drew `random`, for a purpose.
    pub(super) fn derive(&self, purpose: &str, random: &Nonce, cards: &[Card], number: usize) -> [u8; 32] {
        self.mac(purpose, random, &Nonce::new(), &(cards, number)).finalize().into_bytes().into()
    }

    /// Over the purpose, rank 0's nonce, the joiner's nonce and what is said, unambiguously serialised.
    fn mac(&self, purpose: &str, root: &Nonce, joiner: &Nonce, said: &impl serde::Serialize) -> Hmac<Sha256> {
        let message = serde_json::to_vec(&(purpose, root, joiner, said)).expect("plain data serialises");
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC takes keys of any length");
        mac.update(&message);
        mac
    }
}

/// 32 random bytes in hexadecimal.
pub(crate) fn random_hex() -> String {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).expect("the operating system provides random bytes");
    hex(&bytes)
}

/// 8 random bytes.
pub(crate) fn random_word() -> u64 {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).expect("the operating system provides random bytes");
    u64::from_ne_bytes(bytes)
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let digits: Option<Vec<u8>> = text.chars().map(|c| c.to_digit(16).map(|d| d as u8)).collect();
    digits.filter(|d| d.len() % 2 == 0).map(|d| d.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect())
}

/// A short name that is the same for the same parts and tells nothing about them.
pub(super) fn fingerprint(parts: &[&str]) -> String {
    use sha2::Digest;
    let mut hasher = Sha256::new();
    for part in parts {
        hasher.update((part.len() as u64).to_le_bytes());
        hasher.update(part.as_bytes());
    }
    hex(&hasher.finalize()[..16])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_holds_only_for_what_was_said() {
        let secret = Secret::new("s");
        let card = Card {
            rank: 1,
            world_size: 2,
            pid: 1,
            pid_namespace: 1,
            cores: vec![],
            arena_bytes: 1,
            parent_rank: None,
            place: None,
        };
        let (root, joiner) = (random_hex(), random_hex());
        let proof = secret.prove_join(&root, &joiner, &card);
        assert!(secret.verify_join(&root, &joiner, &card, &proof));
        assert!(!secret.verify_join(&root, &joiner, &Card { rank: 0, ..card.clone() }, &proof));
        assert!(!secret.verify_join(&random_hex(), &joiner, &card, &proof));
        assert!(!Secret::new("t").verify_join(&root, &joiner, &card, &proof));
        assert!(!secret.verify_join(&root, &joiner, &card, &"zz".to_string()));
        assert!(
            !secret.verify_welcome(&root, &joiner, (&[card], &[], &Nonce::new()), &proof),
            "a join does not prove a welcome"
        );
    }
}
