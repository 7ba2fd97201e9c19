//! Length-prefixed frames, without input or output of their own: `u32` little-endian length, then that many bytes of one encoded message.
use crate::codec::{CodecError, MESSAGE_LIMIT};

/// Largest payload of a frame, bytes.
pub const FRAME_LIMIT: usize = MESSAGE_LIMIT;
/// Largest payload before the hello is complete, bytes.
pub const HELLO_LIMIT: usize = 64 * 1024;
/// Size of the length prefix, bytes.
pub const HEADER: usize = 4;

/// Puts a length before `payload`.
///
/// # Errors
/// [`CodecError::Encode`] when the payload is larger than [`FRAME_LIMIT`].
pub fn encode(payload: &[u8]) -> Result<Vec<u8>, CodecError> {
    let length = u32::try_from(payload.len())
        .ok()
        .filter(|_| payload.len() <= FRAME_LIMIT)
        .ok_or_else(|| {
            CodecError::Encode(format!(
                "{} bytes exceed the frame limit of {FRAME_LIMIT}",
                payload.len()
            ))
        })?;
    let mut frame = Vec::with_capacity(HEADER + payload.len());
    frame.extend_from_slice(&length.to_le_bytes());
    frame.extend_from_slice(payload);
    Ok(frame)
}

/// Collects bytes as they arrive and gives whole payloads. Never holds more than one frame beyond what was pushed at once.
#[derive(Debug)]
pub struct Decoder {
    buffer: Vec<u8>,
    taken: usize,
    limit: usize,
}

impl Decoder {
    /// A decoder that refuses payloads over `limit` bytes before storing them.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        Self {
            buffer: Vec::new(),
            taken: 0,
            limit: limit.min(FRAME_LIMIT),
        }
    }

    /// Changes the limit, once the hello is complete.
    pub fn set_limit(&mut self, limit: usize) {
        self.limit = limit.min(FRAME_LIMIT);
    }

    /// Adds bytes from the peer.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.taken > 0 {
            self.buffer.drain(..self.taken);
            self.taken = 0;
        }
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole payload, if there is one.
    ///
    /// # Errors
    /// [`CodecError::Malformed`] when a length exceeds the limit; the connection cannot be used any further.
    pub fn next_payload(&mut self) -> Result<Option<Vec<u8>>, CodecError> {
        let rest = &self.buffer[self.taken..];
        let Some(header) = rest.first_chunk::<HEADER>() else {
            return Ok(None);
        };
        let length = u32::from_le_bytes(*header) as usize;
        if length > self.limit {
            return Err(CodecError::Malformed(format!(
                "a frame of {length} bytes exceeds the limit of {}",
                self.limit
            )));
        }
        let Some(payload) = rest.get(HEADER..HEADER + length) else {
            return Ok(None);
        };
        let payload = payload.to_vec();
        self.taken += HEADER + length;
        if self.taken == self.buffer.len() {
            self.buffer.clear();
            self.taken = 0;
            self.buffer.shrink_to(64 * 1024);
        }
        Ok(Some(payload))
    }

    /// Whether a frame has begun but not ended.
    #[must_use]
    pub fn is_mid_frame(&self) -> bool {
        self.buffer.len() > self.taken
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn payloads_come_out_whole_however_the_bytes_are_cut() {
        let mut stream = encode(b"one").unwrap();
        stream.extend(encode(b"").unwrap());
        stream.extend(encode(&[7; 1000]).unwrap());
        for step in [1, 2, 3, 5, 1000, stream.len()] {
            let mut decoder = Decoder::new(FRAME_LIMIT);
            let mut out = Vec::new();
            for chunk in stream.chunks(step) {
                decoder.push(chunk);
                while let Some(payload) = decoder.next_payload().unwrap() {
                    out.push(payload);
                }
            }
            assert_eq!(out, vec![b"one".to_vec(), vec![], vec![7; 1000]], "step {step}");
            assert!(!decoder.is_mid_frame());
        }
    }

    #[test]
    fn a_length_over_the_limit_is_refused_before_its_bytes_arrive() {
        let mut decoder = Decoder::new(10);
        decoder.push(&11u32.to_le_bytes());
        assert!(decoder.next_payload().is_err());
        assert!(encode(&vec![0; FRAME_LIMIT + 1]).is_err());
    }
}
