//! Ids and sizes used by every layer (re-exported from the pure crate), and the parser of cache budgets.
//! Never guesses a unit: a bare number is a number of slots, `GB` means GiB, anything else is refused.
//! Surprising fact: fractions are read exactly, in integers, so `0.1GB` is the same number of bytes everywhere.

pub use cache_policy::{Bytes, ExpertIdx, ExpertKey, LayerIdx, Phase};

/// Index of a token in the vocabulary.
pub type TokenId = u32;

/// A cache budget as typed after `--ssd-streaming-cache-experts`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Budget {
    /// A number of experts.
    Slots(u64),
    /// Bytes, the prefill reserve included.
    Bytes(Bytes),
}

impl From<Budget> for cache_policy::plan::Budget {
    fn from(budget: Budget) -> Self {
        match budget {
            Budget::Slots(slots) => Self::Slots(slots),
            Budget::Bytes(bytes) => Self::Bytes(bytes),
        }
    }
}

/// Why an amount cannot be read.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum AmountError {
    #[error("the amount is empty; write a number of experts such as 2000, or gigabytes such as 64GB")]
    Empty,
    #[error("{text:?} is zero; leave the flag out for the automatic budget")]
    Zero { text: String },
    #[error("{text:?} is not an amount; write a number of experts such as 2000, or gigabytes such as 64GB or 1.5GB")]
    NotAnAmount { text: String },
    #[error("{text:?} is not a number of gigabytes; write for example 64GB or 1.5GB")]
    NotGigabytes { text: String },
    #[error("{text:?} is larger than any machine; write for example 64GB")]
    TooLarge { text: String },
}

/// Reads `2000` (slots) or `64GB`, `1.5GB` (GiB). No sign, no space, no other unit.
pub fn parse_budget(text: &str) -> Result<Budget, AmountError> {
    if text.is_empty() {
        return Err(AmountError::Empty);
    }
    let shown = || text.chars().take(40).collect::<String>();
    if text.ends_with("GB") {
        let bytes = parse_gigabytes(text).map_err(|e| match e {
            AmountError::NotGigabytes { text } => AmountError::NotAnAmount { text },
            other => other,
        })?;
        // Less than a byte is nothing either.
        return if bytes.0 == 0 { Err(AmountError::Zero { text: shown() }) } else { Ok(Budget::Bytes(bytes)) };
    }
    if !text.bytes().all(|b| b.is_ascii_digit()) {
        return Err(AmountError::NotAnAmount { text: shown() });
    }
    match text.parse::<u64>() {
        Ok(0) => Err(AmountError::Zero { text: shown() }),
        Ok(slots) => Ok(Budget::Slots(slots)),
        Err(_) => Err(AmountError::TooLarge { text: shown() }),
    }
}

/// Reads `64GB`, `1.5GB`, `0GB`: GiB with at most nine decimals.
pub fn parse_gigabytes(text: &str) -> Result<Bytes, AmountError> {
    if text.is_empty() {
        return Err(AmountError::Empty);
    }
    let shown = || text.chars().take(40).collect::<String>();
    let bad = || AmountError::NotGigabytes { text: shown() };
    let number = text.strip_suffix("GB").ok_or_else(bad)?;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    let is_digits = |s: &str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_digit());
    if !is_digits(whole) || !is_digits(fraction) || fraction.len() > 9 {
        return Err(bad());
    }
    let too_large = || AmountError::TooLarge { text: shown() };
    let whole: u64 = whole.parse().map_err(|_| too_large())?;
    let fraction_nanos: u128 = format!("{fraction:0<9}").parse().map_err(|_| bad())?;
    let bytes = (u128::from(whole) << 30) + (fraction_nanos << 30) / 1_000_000_000;
    u64::try_from(bytes).map(Bytes).map_err(|_| too_large())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_that_are_accepted() {
        let check = |text: &str, want: Budget| assert_eq!(parse_budget(text), Ok(want), "{text:?}");
        check("1", Budget::Slots(1));
        check("2000", Budget::Slots(2000));
        check("18446744073709551615", Budget::Slots(u64::MAX));
        check("64GB", Budget::Bytes(Bytes::gib(64)));
        check("500GB", Budget::Bytes(Bytes::gib(500)));
        check("1.5GB", Budget::Bytes(Bytes(3 << 29)));
        check("0.25GB", Budget::Bytes(Bytes::mib(256)));
        check("0.000000001GB", Budget::Bytes(Bytes(1)));
        check("007GB", Budget::Bytes(Bytes::gib(7)));
    }

    #[test]
    fn budgets_that_are_refused() {
        use AmountError as E;
        let check = |text: &str, want: fn(String) -> E| {
            assert_eq!(parse_budget(text), Err(want(text.chars().take(40).collect())), "{text:?}");
        };
        assert_eq!(parse_budget(""), Err(E::Empty));
        for text in ["0", "000", "0GB", "0.0GB", "0.0000000000GB"] {
            let err = parse_budget(text).unwrap_err();
            assert!(matches!(err, E::Zero { .. } | E::NotAnAmount { .. }), "{text:?}: {err}");
        }
        check("0", |text| E::Zero { text });
        check("0GB", |text| E::Zero { text });
        let unreadable = [
            "-1",
            "+1",
            "-1GB",
            "NaNGB",
            "infGB",
            "8 GB",
            " 8GB",
            "8GB ",
            "8gb",
            "8G",
            "8GiB",
            "8MB",
            "GB",
            ".GB",
            ".5GB",
            "5.GB",
            "1.2.3GB",
            "1e3GB",
            "1_000",
            "1,5GB",
            "0x10",
            "eight",
            "8GB8GB",
            "\u{0668}GB",
            "\u{0668}",
            "1.0000000001GB",
        ];
        for text in unreadable {
            check(text, |text| E::NotAnAmount { text });
        }
        for text in ["18446744073709551616", "99999999999999999999999GB", "17179869184GB"] {
            check(text, |text| E::TooLarge { text });
        }
        assert!(parse_budget("17179869183GB").is_ok());
        let long = "9".repeat(10_000);
        check(&long, |text| E::TooLarge { text });
    }

    #[test]
    fn gigabytes_need_their_unit_and_may_be_zero() {
        assert_eq!(parse_gigabytes("0GB"), Ok(Bytes(0)));
        assert_eq!(parse_gigabytes("12GB"), Ok(Bytes::gib(12)));
        assert_eq!(parse_gigabytes("12"), Err(AmountError::NotGigabytes { text: "12".into() }));
        assert_eq!(parse_gigabytes(""), Err(AmountError::Empty));
    }
}
