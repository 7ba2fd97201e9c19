//! The kept end of one output stream: a bounded tail, the exact count of bytes, and a text view that never cuts a character.
use std::collections::VecDeque;

use dsh_policy::ByteString;

/// Bytes before the tail that are remembered to see whether the tail begins inside a character (the longest has four).
const LOOK_BACK: usize = 3;

/// The last bytes of a stream. Memory grows with what is written, up to the limit.
#[derive(Debug)]
pub(crate) struct Tail {
    limit: usize,
    held: VecDeque<u8>,
    total: u64,
}

/// What a tail looks like as text.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TextView {
    /// Invalid UTF-8 is replaced visibly.
    pub(crate) text: String,
    /// The exact bytes, when the text cannot show them.
    pub(crate) raw: Option<ByteString>,
}

impl Tail {
    pub(crate) fn new(limit: usize) -> Self {
        Self {
            limit,
            held: VecDeque::new(),
            total: 0,
        }
    }

    /// Bytes written so far.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// Whether more was written than is kept.
    pub(crate) fn is_truncated(&self) -> bool {
        self.total > self.limit as u64
    }

    /// Everything written so far, as long as nothing was dropped.
    pub(crate) fn whole(&self) -> Option<Vec<u8>> {
        (self.total == self.held.len() as u64).then(|| self.held.iter().copied().collect())
    }

    /// Adds bytes and drops the oldest beyond the limit.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.total += bytes.len() as u64;
        let capacity = self.limit + LOOK_BACK;
        let fresh = &bytes[bytes.len().saturating_sub(capacity)..];
        let surplus = (self.held.len() + fresh.len()).saturating_sub(capacity);
        self.held.drain(..surplus);
        self.held.extend(fresh);
    }

    /// The text of the tail.
    pub(crate) fn view(mut self) -> TextView {
        let bytes = self.held.make_contiguous();
        let mut start = bytes.len().saturating_sub(self.limit);
        if let Some(end) = character_across(bytes, start) {
            start = end;
        }
        let kept = &bytes[start..];
        match std::str::from_utf8(kept) {
            Ok(text) => TextView {
                text: text.to_owned(),
                raw: None,
            },
            Err(_) => TextView {
                text: String::from_utf8_lossy(kept).into_owned(),
                raw: Some(ByteString::from(kept)),
            },
        }
    }
}

/// Where the character ends that begins before `cut` and goes on after it, if there is one.
fn character_across(bytes: &[u8], cut: usize) -> Option<usize> {
    (1..=LOOK_BACK.min(cut)).find_map(|back| {
        let begin = cut - back;
        (back + 1..=4).find_map(|length| {
            let candidate = bytes.get(begin..begin + length)?;
            let text = std::str::from_utf8(candidate).ok()?;
            (text.chars().count() == 1).then_some(begin + length)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view_of(limit: usize, chunks: &[&[u8]]) -> (TextView, u64, bool) {
        let mut tail = Tail::new(limit);
        for chunk in chunks {
            tail.push(chunk);
        }
        let (total, truncated) = (tail.total(), tail.is_truncated());
        (tail.view(), total, truncated)
    }

    #[test]
    fn what_fits_is_kept_whole_and_what_does_not_keeps_its_end() {
        assert_eq!(
            view_of(4, &[b"ab", b"cd"]),
            (
                TextView {
                    text: "abcd".into(),
                    raw: None
                },
                4,
                false
            )
        );
        assert_eq!(
            view_of(4, &[b"ab", b"cde"]),
            (
                TextView {
                    text: "bcde".into(),
                    raw: None
                },
                5,
                true
            )
        );
        assert_eq!(view_of(4, &[&[b'x'; 100_000], b"end"]).0.text, "xend");
        assert_eq!(
            view_of(0, &[b"abc"]),
            (
                TextView {
                    text: String::new(),
                    raw: None
                },
                3,
                true
            )
        );
    }

    #[test]
    fn a_character_that_the_limit_would_cut_is_left_out_whole() {
        for (character, length) in [("ü", 2), ("€", 3), ("😀", 4)] {
            for cut in 1..length {
                let (view, ..) = view_of(length - cut + 1, &[character.as_bytes(), b"z"]);
                assert_eq!(
                    view,
                    TextView {
                        text: "z".into(),
                        raw: None
                    },
                    "{character} cut after {cut}"
                );
            }
        }
    }

    #[test]
    fn bytes_that_are_no_text_are_replaced_and_given_exactly() {
        let (view, ..) = view_of(10, &[b"\xff\x00\xe2\x82"]);
        assert_eq!(view.text, "\u{fffd}\0\u{fffd}");
        assert_eq!(view.raw, Some(ByteString(b"\xff\x00\xe2\x82".to_vec())));
        // A stray continuation byte at the cut is no half of a character: it is shown, not swallowed.
        assert_eq!(view_of(2, &[b"a\x82b"]).0.text, "\u{fffd}b");
    }

    #[test]
    fn the_whole_is_there_until_something_was_dropped() {
        let mut tail = Tail::new(4);
        tail.push(b"abcd");
        assert_eq!(tail.whole(), Some(b"abcd".to_vec()));
        tail.push(&[b'x'; 10]);
        assert_eq!(tail.whole(), None);
    }
}
