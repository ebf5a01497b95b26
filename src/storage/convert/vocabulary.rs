//! tokenizer.json and tokenizer_config.json as the `tokenizer.*` keys of a GGUF file.
//! Owns the translation; never tokenises.
//! Surprising fact: vocabulary words stay in the byte-level alphabet, added tokens are plain text, as in their source.

use std::path::Path;

use serde_json::{Map, Value};

use super::checkpoint::{Config, JsonFile, read_json};
use super::error::ConvertError;
use crate::storage::gguf::{Metadata, StringArray};

const TYPE_NORMAL: i32 = 1;
const TYPE_SPECIAL: i32 = 3;
/// An id that no text maps to: the embedding has a row for it, the tokenizer has no word.
const TYPE_UNUSED: i32 = 5;

/// Largest vocabulary believed.
const VOCAB_MAX: usize = 1 << 22;

/// Adds the keys; a folder without tokenizer.json gives a file without them.
pub(super) fn add(metadata: &mut Metadata, config: &Config, folder: &Path) -> Result<(), ConvertError> {
    let path = folder.join("tokenizer.json");
    let Some(JsonFile { object: json, .. }) = read_json(&path)? else { return Ok(()) };
    let settings = read_json(&folder.join("tokenizer_config.json"))?.map(|file| file.object).unwrap_or_default();
    let fail = |problem: String| ConvertError::Tokenizer { path: path.clone(), problem };
    let size = config.u32("vocab_size")? as usize;
    let words = Words::of(&json, size).map_err(fail)?;
    metadata.insert("tokenizer.ggml.model", "gpt2");
    metadata.insert("tokenizer.ggml.pre", config.arch().splitting());
    metadata.insert("tokenizer.ggml.tokens", words.texts.iter().collect::<StringArray>());
    metadata.insert("tokenizer.ggml.token_type", words.types.clone());
    metadata.insert("tokenizer.ggml.merges", merges(&json).map_err(fail)?);
    for (key, setting) in [("bos", "bos_token"), ("eos", "eos_token"), ("padding", "pad_token")] {
        let id_key = format!("{setting}_id");
        let id = match config.get(&id_key) {
            Some(Value::Number(_)) => Some(config.u32(&id_key)?),
            _ => words.find(settings.get(setting)),
        };
        match id {
            Some(id) if id as usize >= size => {
                return Err(fail(format!("{setting} is token {id}, but there are {size}")));
            }
            Some(id) => {
                metadata.insert(format!("tokenizer.ggml.{key}_token_id"), id);
            }
            None => {}
        }
    }
    // Fixed in this dialect (spec 1.3), whatever the template does with the begin token.
    metadata.insert("tokenizer.ggml.add_bos_token", true);
    metadata.insert("tokenizer.ggml.add_eos_token", false);
    if let Some(template) = settings.get("chat_template").and_then(Value::as_str) {
        metadata.insert("tokenizer.chat_template", template);
    }
    Ok(())
}

/// Text and type of every id.
struct Words {
    texts: Vec<String>,
    types: Vec<i32>,
}

impl Words {
    fn of(json: &Map<String, Value>, size: usize) -> Result<Self, String> {
        if size > VOCAB_MAX {
            return Err(format!("{size} tokens: more than the limit of {VOCAB_MAX}"));
        }
        let model = json.get("model").and_then(Value::as_object).ok_or("model is missing")?;
        if model.get("type").and_then(Value::as_str) != Some("BPE") {
            return Err("model.type is not BPE".into());
        }
        let vocab = model.get("vocab").and_then(Value::as_object).ok_or("model.vocab is missing")?;
        let mut texts: Vec<Option<String>> = vec![None; size];
        let mut types = vec![TYPE_UNUSED; size];
        let mut place = |text: &str, id: Option<u64>, ty: i32| {
            let slot = id.and_then(|id| usize::try_from(id).ok()).filter(|id| *id < size);
            let slot = slot.ok_or_else(|| format!("token {text:?} has id {id:?}, but vocab_size is {size}"))?;
            match &texts[slot] {
                Some(other) if other != text => return Err(format!("tokens {other:?} and {text:?} share id {slot}")),
                _ => {}
            }
            texts[slot] = Some(text.to_owned());
            types[slot] = ty;
            Ok(())
        };
        for (text, id) in vocab {
            place(text, id.as_u64(), TYPE_NORMAL)?;
        }
        for added in json.get("added_tokens").and_then(Value::as_array).into_iter().flatten() {
            let text = added.get("content").and_then(Value::as_str).ok_or("an added token has no content")?;
            place(text, added.get("id").and_then(Value::as_u64), TYPE_SPECIAL)?;
        }
        let texts = texts.into_iter().enumerate().map(|(id, t)| t.unwrap_or_else(|| format!("[PAD{id}]"))).collect();
        Ok(Self { texts, types })
    }

    /// The id of a token given as text, or as an object with `content`.
    fn find(&self, setting: Option<&Value>) -> Option<u32> {
        let text = setting?.as_str().or_else(|| setting?.get("content")?.as_str())?;
        self.texts.iter().position(|t| t == text).map(|id| id as u32)
    }
}

/// Merge rules, one `left right` each; the source has them as such strings or as pairs.
fn merges(json: &Map<String, Value>) -> Result<StringArray, String> {
    let list = json.get("model").and_then(|m| m.get("merges")).and_then(Value::as_array);
    let mut out = StringArray::default();
    for (i, merge) in list.ok_or("model.merges is missing")?.iter().enumerate() {
        let pair = merge.as_array().map(|p| p.iter().filter_map(Value::as_str).collect::<Vec<_>>());
        match (merge.as_str(), pair.as_deref()) {
            (Some(text), _) => out.push(text),
            (None, Some(&[left, right])) => out.push(&format!("{left} {right}")),
            _ => return Err(format!("merge {i} is neither a string nor a pair")),
        }
    }
    Ok(out)
}
