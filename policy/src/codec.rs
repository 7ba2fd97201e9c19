//! The two encodings of the wire and the plan. The only file that names the crates behind them.
//!
//! `bincode` is pinned (its upkeep has ended); replacing it means changing this file and nothing else.
use serde::Serialize;
use serde::de::DeserializeOwned;

pub use bincode::{Decode, Encode};

/// Why bytes could not be turned into a message, or a message into bytes.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum CodecError {
    /// The bytes are not a message of the expected type.
    #[error("malformed message: {0}")]
    Malformed(String),
    /// The message is well formed so far but of a kind that this version does not know.
    #[error("unknown message kind {0}")]
    UnknownKind(String),
    /// A message was decoded but bytes were left over.
    #[error("{0} bytes follow the message")]
    TrailingBytes(usize),
    /// The message could not be encoded.
    #[error("cannot encode the message: {0}")]
    Encode(String),
}

/// Largest single message that either encoding accepts, in bytes: a command of 2 MiB plus its environment, in base64.
pub const MESSAGE_LIMIT: usize = 16 * 1024 * 1024;

/// Compact encoding, used by the Rust client and between the daemon and its helper.
///
/// # Errors
/// [`CodecError::Encode`] when a value cannot be represented (not the case for the types of this crate).
pub fn to_binary<T: Encode>(value: &T) -> Result<Vec<u8>, CodecError> {
    bincode::encode_to_vec(value, bincode::config::standard()).map_err(|error| CodecError::Encode(error.to_string()))
}

/// Decodes the compact encoding; the whole input must be used, and no allocation exceeds [`MESSAGE_LIMIT`].
///
/// # Errors
/// [`CodecError::UnknownKind`] when the outermost enum has a variant of a newer peer, otherwise [`CodecError::Malformed`] or
/// [`CodecError::TrailingBytes`].
pub fn from_binary<T: Decode<()>>(bytes: &[u8]) -> Result<T, CodecError> {
    let config = bincode::config::standard().with_limit::<MESSAGE_LIMIT>();
    match bincode::decode_from_slice::<T, _>(bytes, config) {
        Ok((value, used)) if used == bytes.len() => Ok(value),
        Ok((_, used)) => Err(CodecError::TrailingBytes(bytes.len() - used)),
        Err(bincode::error::DecodeError::UnexpectedVariant { found, type_name, .. })
            if std::any::type_name::<T>().rsplit("::").next() == Some(type_name) =>
        {
            Err(CodecError::UnknownKind(found.to_string()))
        }
        Err(error) => Err(CodecError::Malformed(error.to_string())),
    }
}

/// Text encoding, for every other language.
///
/// # Errors
/// [`CodecError::Encode`] when a value cannot be represented (not the case for the types of this crate).
pub fn to_json<T: Serialize>(value: &T) -> Result<Vec<u8>, CodecError> {
    serde_json::to_vec(value).map_err(|error| CodecError::Encode(error.to_string()))
}

/// Decodes the text encoding. Unknown fields are ignored, so that a newer minor version may add some.
///
/// # Errors
/// [`CodecError::Malformed`] with the position.
pub fn from_json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, CodecError> {
    serde_json::from_slice(bytes).map_err(|error| CodecError::Malformed(error.to_string()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Encode, Decode)]
    enum Newer {
        One,
        Two(u8),
        Three,
    }
    mod older {
        use super::super::{Decode, Encode};
        #[derive(Debug, PartialEq, Encode, Decode)]
        pub(super) enum Newer {
            One,
        }
    }

    #[test]
    fn left_over_bytes_are_refused() {
        let mut bytes = to_binary(&Newer::Two(7)).unwrap();
        bytes.push(0);
        assert_eq!(from_binary::<Newer>(&bytes), Err(CodecError::TrailingBytes(1)));
    }

    #[test]
    fn a_kind_of_a_newer_peer_is_told_apart_from_garbage() {
        let bytes = to_binary(&Newer::Three).unwrap();
        assert_eq!(
            from_binary::<older::Newer>(&bytes),
            Err(CodecError::UnknownKind("2".into()))
        );
        assert!(matches!(from_binary::<Newer>(&[]), Err(CodecError::Malformed(_))));
    }

    #[test]
    fn a_length_prefix_larger_than_the_limit_allocates_nothing() {
        let bytes = [0xfd, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f];
        assert!(matches!(from_binary::<Vec<u8>>(&bytes), Err(CodecError::Malformed(_))));
    }
}
