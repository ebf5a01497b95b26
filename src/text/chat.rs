//! Conversations as data: messages, tool definitions and tool calls, and their usual JSON form.
//! Owns no prompt format; a model's rules (`models/<arch>/chat.rs`) or a template turn these into segments.
//! Surprising fact: the arguments of a tool call are kept as text, since what a model wrote need not be JSON.

use serde_json::{Value, json};
use thiserror::Error;

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    System,
    User,
    Assistant,
    /// The result of a tool call.
    Tool,
    /// A reminder that goes with a turn but is nobody's text.
    LatestReminder,
}

/// One tool call of an assistant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    pub id: String,
    pub name: String,
    /// JSON text of the argument object, as the model or client wrote it.
    pub arguments: String,
}

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    pub role: Role,
    pub content: String,
    /// What an assistant thought before `content`, without its tags.
    pub reasoning: Option<String>,
    pub tool_calls: Vec<ToolCall>,
    /// The call that a [`Role::Tool`] message answers.
    pub tool_call_id: Option<String>,
}

impl Message {
    /// A message of text only.
    pub fn new(role: Role, content: impl Into<String>) -> Message {
        Message { role, content: content.into(), reasoning: None, tool_calls: Vec::new(), tool_call_id: None }
    }

    /// Reads the usual JSON form: `role`, `content` (text, null or text parts), `reasoning_content`, `tool_calls`, `tool_call_id`.
    ///
    /// # Errors
    /// [`ChatError`], naming the field.
    pub fn from_json(value: &Value) -> Result<Message, ChatError> {
        let role = match value["role"].as_str() {
            Some("system" | "developer") => Role::System,
            Some("user") => Role::User,
            Some("assistant") => Role::Assistant,
            Some("tool") => Role::Tool,
            Some("latest_reminder") => Role::LatestReminder,
            _ => return Err(ChatError::field("role", "one of system, user, assistant, tool", &value["role"])),
        };
        let mut message = Message::new(role, content_text(&value["content"])?);
        message.reasoning = optional_text(value, "reasoning_content")?;
        message.tool_call_id = optional_text(value, "tool_call_id")?;
        match &value["tool_calls"] {
            Value::Null => {}
            Value::Array(calls) => {
                message.tool_calls = calls.iter().map(ToolCall::from_json).collect::<Result<_, _>>()?;
            }
            other => return Err(ChatError::field("tool_calls", "a list", other)),
        }
        Ok(message)
    }

    /// The usual JSON form, as templates expect it: absent fields are left out, arguments that are a JSON object become one.
    pub fn to_json(&self) -> Value {
        let role = match self.role {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool => "tool",
            Role::LatestReminder => "latest_reminder",
        };
        let mut value = json!({"role": role, "content": self.content});
        if let Some(reasoning) = &self.reasoning {
            value["reasoning_content"] = reasoning.as_str().into();
        }
        if !self.tool_calls.is_empty() {
            value["tool_calls"] = self.tool_calls.iter().map(ToolCall::to_json).collect();
        }
        if let Some(id) = &self.tool_call_id {
            value["tool_call_id"] = id.as_str().into();
        }
        value
    }
}

impl ToolCall {
    fn from_json(value: &Value) -> Result<ToolCall, ChatError> {
        let function = &value["function"];
        let Some(name) = function["name"].as_str() else {
            return Err(ChatError::field("tool_calls.function.name", "text", &function["name"]));
        };
        let arguments = match &function["arguments"] {
            Value::String(text) => text.clone(),
            Value::Object(_) => function["arguments"].to_string(),
            other => return Err(ChatError::field("tool_calls.function.arguments", "JSON text or an object", other)),
        };
        Ok(ToolCall { id: value["id"].as_str().unwrap_or_default().to_owned(), name: name.to_owned(), arguments })
    }

    fn to_json(&self) -> Value {
        let arguments = match serde_json::from_str(&self.arguments) {
            Ok(object @ Value::Object(_)) => object,
            _ => Value::String(self.arguments.clone()),
        };
        json!({"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}})
    }
}

/// A tool that the model may call.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolDefinition {
    pub name: String,
    /// Empty where none was given.
    pub description: String,
    /// JSON schema of the argument object; null where none was given.
    pub parameters: Value,
    /// The whole function object as it was given; templates print it.
    pub function: Value,
}

impl ToolDefinition {
    /// Reads `{"type": "function", "function": {"name", "description", "parameters"}}`.
    ///
    /// # Errors
    /// [`ChatError`], naming the field.
    pub fn from_json(value: &Value) -> Result<ToolDefinition, ChatError> {
        let function = &value["function"];
        let Some(name) = function["name"].as_str() else {
            return Err(ChatError::field("tools.function.name", "text", &function["name"]));
        };
        Ok(ToolDefinition {
            name: name.to_owned(),
            description: function["description"].as_str().unwrap_or_default().to_owned(),
            parameters: function["parameters"].clone(),
            function: function.clone(),
        })
    }
}

/// A conversation that does not have the expected form.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ChatError {
    #[error("field '{field}' must be {expected}, found {found}")]
    Field { field: &'static str, expected: &'static str, found: String },
}

impl ChatError {
    fn field(field: &'static str, expected: &'static str, found: &Value) -> ChatError {
        // A whole document in an error message helps nobody.
        let found = found.to_string().chars().take(80).collect();
        ChatError::Field { field, expected, found }
    }
}

fn content_text(content: &Value) -> Result<String, ChatError> {
    match content {
        Value::Null => Ok(String::new()),
        Value::String(text) => Ok(text.clone()),
        Value::Array(parts) => parts
            .iter()
            .map(|part| match (part["type"].as_str(), part["text"].as_str()) {
                (Some("text"), Some(text)) => Ok(text),
                _ => Err(ChatError::field("content", "text or a list of text parts", part)),
            })
            .collect(),
        other => Err(ChatError::field("content", "text or a list of text parts", other)),
    }
}

fn optional_text(value: &Value, field: &'static str) -> Result<Option<String>, ChatError> {
    match &value[field] {
        Value::Null => Ok(None),
        Value::String(text) => Ok(Some(text.clone())),
        other => Err(ChatError::field(field, "text", other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(value: Value) -> String {
        Message::from_json(&value).unwrap_err().to_string()
    }

    #[test]
    fn messages_are_read_from_json() {
        let parts = json!({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]});
        assert_eq!(Message::from_json(&parts), Ok(Message::new(Role::User, "ab")));
        let call = json!({"role": "assistant", "content": null, "reasoning_content": "r", "tool_calls": [
            {"id": "1", "function": {"name": "f", "arguments": {"a": 1}}},
            {"id": "2", "function": {"name": "g", "arguments": "{bad"}}]});
        let message = Message::from_json(&call).unwrap();
        assert_eq!((message.content.as_str(), message.reasoning.as_deref()), ("", Some("r")));
        let arguments: Vec<&str> = message.tool_calls.iter().map(|call| call.arguments.as_str()).collect();
        assert_eq!(arguments, ["{\"a\":1}", "{bad"]);
    }

    #[test]
    fn wrong_fields_are_named() {
        assert!(refusal(json!({"role": "robot"})).contains("'role'"));
        assert!(refusal(json!({"role": "user", "content": 3})).contains("'content'"));
        assert!(refusal(json!({"role": "user", "content": [{"type": "image_url"}]})).contains("'content'"));
        assert!(refusal(json!({"role": "assistant", "tool_calls": {}})).contains("'tool_calls'"));
        assert!(refusal(json!({"role": "assistant", "tool_calls": [{}]})).contains("function.name"));
        assert!(refusal(json!("x")).contains("'role'"));
        assert!(ToolDefinition::from_json(&json!({"function": {}})).is_err());
    }
}
