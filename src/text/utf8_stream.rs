//! Turns token bytes into text as they come. Owns the bytes of a character that is not complete yet (three at most); never
//! withholds a complete character. Surprising fact: cut anywhere, the output equals `String::from_utf8_lossy` of all bytes.

/// Incremental UTF-8 decoder; bytes that are no UTF-8 become U+FFFD.
#[derive(Default)]
pub struct Utf8Stream {
    /// The start of a character, at most three bytes.
    pending: Vec<u8>,
}

impl Utf8Stream {
    /// A stream at the start of a text.
    pub fn new() -> Utf8Stream {
        Utf8Stream::default()
    }

    /// Takes the bytes of one more token and returns the text that is now certain, possibly none.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.pending.extend_from_slice(bytes);
        let mut text = String::new();
        let mut used = 0;
        for chunk in self.pending.utf8_chunks() {
            text.push_str(chunk.valid());
            used += chunk.valid().len();
            if chunk.invalid().is_empty() {
                break;
            }
            if used + chunk.invalid().len() == self.pending.len() && may_be_completed(chunk.invalid()) {
                break;
            }
            text.push('\u{fffd}');
            used += chunk.invalid().len();
        }
        self.pending.drain(..used);
        text
    }

    /// Ends the text: an incomplete character becomes U+FFFD. The stream is then at the start of a text again.
    pub fn finish(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        text
    }
}

/// Whether more bytes could make `invalid` a character: it is refused only for being short.
fn may_be_completed(invalid: &[u8]) -> bool {
    std::str::from_utf8(invalid).is_err_and(|error| error.error_len().is_none())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Feeds the pieces and compares with the whole.
    fn check(pieces: &[Vec<u8>]) {
        let mut stream = Utf8Stream::new();
        let mut text: String = pieces.iter().map(|piece| stream.push(piece)).collect();
        text.push_str(&stream.finish());
        assert_eq!(text, String::from_utf8_lossy(&pieces.concat()), "{pieces:02x?}");
        assert_eq!(stream.push(b"x"), "x", "finish leaves nothing behind");
    }

    #[test]
    fn complete_characters_come_at_once() {
        let mut stream = Utf8Stream::new();
        let bytes = "a\u{e9}\u{4f60}\u{1f999}".as_bytes();
        let parts: Vec<String> = bytes.iter().map(|&byte| stream.push(&[byte])).collect();
        assert_eq!(parts, ["a", "", "\u{e9}", "", "", "\u{4f60}", "", "", "", "\u{1f999}"]);
        assert_eq!(stream.finish(), "");
    }

    #[test]
    fn invalid_bytes_are_replaced_as_soon_as_they_are_certain() {
        let mut stream = Utf8Stream::new();
        assert_eq!(stream.push(&[0xe4, 0xbd]), "");
        assert_eq!(stream.push(b"A"), "\u{fffd}A");
        assert_eq!(stream.push(&[0xff, 0xf0]), "\u{fffd}");
        assert_eq!(stream.finish(), "\u{fffd}");
        // A surrogate half and an overlong form can never be completed.
        assert_eq!(stream.push(&[0xed, 0xa0]), "\u{fffd}\u{fffd}");
        assert_eq!(stream.push(&[0xc0]), "\u{fffd}");
    }

    proptest! {
        #[test]
        fn any_cut_equals_the_whole(
            pieces in prop::collection::vec(
                prop_oneof![
                    prop::collection::vec(any::<u8>(), 0..6),
                    prop::collection::vec(prop::sample::select(vec![0x41, 0x80, 0xbf, 0xc3, 0xe0, 0xed, 0xf0, 0xf4, 0x9f, 0xa0]), 0..6),
                ],
                0..12,
            )
        ) {
            check(&pieces);
        }

        #[test]
        fn valid_text_survives_any_cut(text in "\\PC{0,24}", step in 1usize..5) {
            let pieces: Vec<Vec<u8>> = text.as_bytes().chunks(step).map(<[u8]>::to_vec).collect();
            let mut stream = Utf8Stream::new();
            let joined: String = pieces.iter().map(|piece| stream.push(piece)).collect();
            prop_assert_eq!(joined, text);
            check(&pieces);
        }
    }
}
