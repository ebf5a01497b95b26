//! The printable alphabet of byte-level BPE: one character for each of the 256 byte values.
//! Owns that mapping; never looks at a vocabulary. Surprising fact: the space is written as U+0120, because the bytes that
//! do not print are moved to U+0100 upward in byte order.

/// Bytes that stand for themselves: the printable parts of Latin-1.
const fn is_printable(byte: u8) -> bool {
    matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff)
}

const fn build_chars() -> [char; 256] {
    let mut chars = ['\0'; 256];
    let mut moved = 0;
    let mut byte = 0;
    while byte < 256 {
        let code = if is_printable(byte as u8) {
            byte as u32
        } else {
            moved += 1;
            0xff + moved
        };
        chars[byte] = match char::from_u32(code) {
            Some(c) => c,
            None => panic!("code points up to U+0143 are characters"),
        };
        byte += 1;
    }
    chars
}

/// Character of each byte.
static CHARS: [char; 256] = build_chars();

/// Number of code points that the alphabet can reach: U+0000..U+0143, with holes.
const CODES: usize = 0x144;

const fn build_bytes() -> [Option<u8>; CODES] {
    let mut bytes = [None; CODES];
    let chars = build_chars();
    let mut byte = 0;
    while byte < 256 {
        bytes[chars[byte] as usize] = Some(byte as u8);
        byte += 1;
    }
    bytes
}

/// Byte of each code point, where it has one.
static BYTES: [Option<u8>; CODES] = build_bytes();

/// The character that writes `byte`.
pub fn char_of(byte: u8) -> char {
    CHARS[usize::from(byte)]
}

/// The byte that `c` writes, or `None` when `c` is not in the alphabet.
pub fn byte_of(c: char) -> Option<u8> {
    BYTES.get(c as usize).copied().flatten()
}

/// Replaces the content of `out` by `bytes` written in the alphabet.
pub fn write(bytes: &[u8], out: &mut String) {
    out.clear();
    out.extend(bytes.iter().map(|&byte| char_of(byte)));
}

/// Appends the bytes that `text` writes to `out`. When a character is not in the alphabet nothing is appended and the answer is false.
pub fn read(text: &str, out: &mut Vec<u8>) -> bool {
    let start = out.len();
    for c in text.chars() {
        match byte_of(c) {
            Some(byte) => out.push(byte),
            None => {
                out.truncate(start);
                return false;
            }
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_its_own_character() {
        for byte in 0..=255u8 {
            assert_eq!(byte_of(char_of(byte)), Some(byte));
        }
        assert_eq!((char_of(b' '), char_of(b'\n'), char_of(b'a')), ('\u{120}', '\u{10a}', 'a'));
        assert_eq!((char_of(0xad), char_of(0x7f)), ('\u{143}', '\u{121}'));
    }

    #[test]
    fn text_outside_the_alphabet_is_not_read() {
        let mut out = vec![7];
        assert!(!read("ab c", &mut out) && out == [7]);
        assert!(read("ab\u{120}c", &mut out) && out == b"\x07ab c");
    }
}
