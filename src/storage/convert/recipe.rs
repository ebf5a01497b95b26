//! Recipes: a table from tensor class to type, three of them built in, single entries replaceable.
//! Owns the choice of types and the check that rows fit; never encodes.
//! Surprising fact: `native` is no type but "what the checkpoint means": FP8 becomes BF16, FP4 becomes MXFP4.

use std::collections::BTreeMap;
use std::str::FromStr;

use super::error::ConvertError;
use super::names::TensorClass;
use crate::quant::QuantType;

/// The right side of a recipe entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Target {
    /// The exact values of the source.
    Native,
    Type(QuantType),
}

/// A built-in recipe.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BaseRecipe {
    /// Lossless.
    Native,
    /// Q4_K experts (spec 2.4).
    Q4,
    /// IQ2_XXS gate and up, Q2_K down (spec 2.4).
    Q2,
}

/// A type for every class.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Recipe {
    entries: BTreeMap<TensorClass, Target>,
}

impl Recipe {
    /// A built-in recipe.
    pub fn base(base: BaseRecipe) -> Self {
        let entry = |class| {
            let target = match (base, class) {
                (BaseRecipe::Native, _) => Target::Native,
                (_, TensorClass::Attention | TensorClass::Shared | TensorClass::Head) => Target::Type(QuantType::Q8_0),
                (BaseRecipe::Q4, TensorClass::GateUp | TensorClass::Down) => Target::Type(QuantType::Q4_K),
                (BaseRecipe::Q2, TensorClass::GateUp) => Target::Type(QuantType::IQ2_XXS),
                (BaseRecipe::Q2, TensorClass::Down) => Target::Type(QuantType::Q2_K),
                _ => Target::Type(QuantType::F16),
            };
            (class, target)
        };
        Self { entries: TensorClass::SETTABLE.into_iter().map(entry).collect() }
    }

    /// Replaces entries by `CLASS=TYPE` settings.
    ///
    /// # Errors
    /// `Setting` with the possible classes or types.
    pub fn with(mut self, settings: &[String]) -> Result<Self, ConvertError> {
        for given in settings {
            let problem = |problem| ConvertError::Setting { given: given.clone(), problem };
            let (class, target) = given.split_once('=').ok_or_else(|| problem("write CLASS=TYPE".into()))?;
            let known = |c: &TensorClass| c.name() == class;
            let Some(class) = TensorClass::SETTABLE.into_iter().find(known) else {
                let names = TensorClass::SETTABLE.map(TensorClass::name).join(", ");
                return Err(problem(format!("unknown class; the classes are {names}")));
            };
            self.entries.insert(class, target.parse().map_err(problem)?);
        }
        Ok(self)
    }

    /// What `class` becomes.
    pub fn target(&self, class: TensorClass) -> Target {
        match class {
            TensorClass::Fixed => Target::Type(QuantType::F32),
            TensorClass::Rows | TensorClass::Ids => Target::Native,
            _ => self.entries[&class],
        }
    }

    /// The type of a tensor of `class` with rows of `columns` values whose exact form is `native`.
    ///
    /// # Errors
    /// `DoesNotFit` with the types that rows of this length may take.
    pub(in crate::storage) fn choose(
        &self,
        tensor: &str,
        class: TensorClass,
        columns: u64,
        native: QuantType,
    ) -> Result<QuantType, ConvertError> {
        let ty = match self.target(class) {
            Target::Native => native,
            Target::Type(ty) => ty,
        };
        if ty.row_bytes(columns).is_some() {
            return Ok(ty);
        }
        let fits = |t: &QuantType| t.is_numeric() && t.row_bytes(columns).is_some();
        let fitting: Vec<&str> = QuantType::ALL.into_iter().filter(fits).map(QuantType::name).collect();
        Err(ConvertError::DoesNotFit {
            tensor: tensor.into(),
            class: class.name(),
            columns,
            ty,
            fitting: fitting.join(", "),
        })
    }

    /// The provenance line of `deepseek41.quantization` and `deepseek4.quantization`, experts first as in published files.
    pub fn describe(&self) -> String {
        const ORDER: [(TensorClass, &str); 9] = [
            (TensorClass::GateUp, "gate/up"),
            (TensorClass::Down, "down"),
            (TensorClass::Attention, "attention"),
            (TensorClass::Shared, "shared"),
            (TensorClass::Head, "head"),
            (TensorClass::Embedding, "embedding"),
            (TensorClass::Indexer, "indexer"),
            (TensorClass::Mixing, "mixing"),
            (TensorClass::Ngram, "ngram"),
        ];
        let mut text = String::new();
        let mut last = None;
        for (class, label) in ORDER {
            let target = self.target(class);
            match (last, target) {
                (Some(before), _) if before == target => text.push('/'),
                (before, _) => {
                    text.push_str(if before.is_some() { "; " } else { "" });
                    text.push_str(match target {
                        Target::Native => "native",
                        Target::Type(ty) => ty.name(),
                    });
                    text.push(' ');
                }
            }
            text.push_str(label);
            last = Some(target);
        }
        text
    }

    /// Whether some class takes a type whose encoder is much better with an importance file.
    pub fn wants_importance(&self) -> bool {
        let coarse = [QuantType::IQ2_XXS, QuantType::Q2_K, QuantType::Q3_K];
        self.entries.values().any(|t| matches!(t, Target::Type(ty) if coarse.contains(ty)))
    }
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.eq_ignore_ascii_case("native") {
            return Ok(Target::Native);
        }
        let numeric = || QuantType::ALL.into_iter().filter(|t| t.is_numeric());
        match numeric().find(|t| t.name().eq_ignore_ascii_case(text)) {
            Some(ty) => Ok(Target::Type(ty)),
            None => {
                let names: Vec<&str> = numeric().map(QuantType::name).collect();
                Err(format!("unknown type; the types are native, {}", names.join(", ")))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_replace_entries() {
        let recipe = Recipe::base(BaseRecipe::Q2).with(&["attention=q4_k".into(), "down=native".into()]).unwrap();
        assert_eq!(recipe.target(TensorClass::Attention), Target::Type(QuantType::Q4_K));
        assert_eq!(recipe.target(TensorClass::Down), Target::Native);
        assert_eq!(recipe.target(TensorClass::GateUp), Target::Type(QuantType::IQ2_XXS));
        assert_eq!(recipe.target(TensorClass::Fixed), Target::Type(QuantType::F32));
        assert!(recipe.wants_importance());
        assert!(!Recipe::base(BaseRecipe::Q4).wants_importance());
    }

    #[test]
    fn provenance_reads_as_in_published_files() {
        let check = |base, text: &str| assert_eq!(Recipe::base(base).describe(), text);
        let rest = "Q8_0 attention/shared/head; F16 embedding/indexer/mixing/ngram";
        check(BaseRecipe::Q2, &format!("IQ2_XXS gate/up; Q2_K down; {rest}"));
        check(BaseRecipe::Q4, &format!("Q4_K gate/up/down; {rest}"));
    }

    #[test]
    fn bad_settings_say_what_is_possible() {
        let check = |given: &str, text: &str| {
            let error = Recipe::base(BaseRecipe::Q4).with(&[given.into()]).unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        };
        check("attention", "write CLASS=TYPE");
        check("router=Q8_0", "the classes are embedding, attention, shared");
        check("head=Q9", "the types are native, F32, F16");
        check("head=I8", "unknown type");
    }

    #[test]
    fn a_type_that_does_not_fit_is_refused_with_those_that_do() {
        let recipe = Recipe::base(BaseRecipe::Q4);
        let error = recipe.choose("blk.0.x", TensorClass::Down, 96, QuantType::BF16).unwrap_err().to_string();
        assert!(error.contains("blk.0.x: rows of 96 values do not fit Q4_K"), "{error}");
        assert!(error.contains("F32, F16, BF16, Q8_0, MXFP4 (--set down=TYPE)"), "{error}");
    }
}
