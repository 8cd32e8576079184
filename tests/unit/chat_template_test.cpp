// The answers come from Jinja2 itself; scripts/make_template_cases.py writes them to
// tests/data/templates/cases.json.

#include "text/chat_template.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <thread>

#include "tests/support/test_data.h"
#include "util/files.h"

namespace ekv {
namespace {

const std::string kDir = (test::test_data() / "templates").string() + "/";

// strftime_now prints local time; the answers are in UTC.
const bool kUtc = [] {
  setenv("TZ", "UTC", 1);
  tzset();
  return true;
}();

const Json& cases() {
  static const Json data = [] {
    Result<std::string> text = read_file(kDir + "cases.json");
    EXPECT_TRUE(text) << "run scripts/make_template_cases.py";
    Result<Json> parsed = parse_json(*text);
    EXPECT_TRUE(parsed);
    return *parsed;
  }();
  return data;
}

// The rendered text, or "!" and the message.
std::string render(const std::string& source, const Json& context) {
  const Result<ChatTemplate> compiled = ChatTemplate::compile(source, "t.jinja");
  if (!compiled) return "!" + compiled.error().message;
  const Result<std::string> text = compiled->render(context, member(cases(), "now").get<int64_t>());
  return text ? *text : "!" + text.error().message;
}

Json parsed(const std::string& text) {
  Result<Json> value = parse_json(text);
  EXPECT_TRUE(value) << text;
  return *value;
}

// Compares with the stored answer: the same bytes, or an error on both sides.
void expect_answer(const std::string& source, const Json& context, const Json& answer) {
  const std::string got = render(source, context);
  if (answer.is_null())
    EXPECT_EQ(got.substr(0, 9), "!t.jinja:") << "Jinja2 refuses this template:\n" << source;
  else
    EXPECT_EQ(got, answer.get<std::string>()) << "template:\n" << source;
}

const Json kRoles =
    parsed(R"({"ms":[{"role":"a","content":"A"},{"role":"b","content":"B"},{"role":"c","content":"C"}]})");

std::string with_roles(const std::string& source) { return render(source, kRoles); }

TEST(ChatTemplate, Tpl3FeaturesThatMinimalEnginesGetWrong) {
  EXPECT_EQ(with_roles("{% set x = 1 %}{% for i in [1,2] %}{% set x = x + i %}{% endfor %}{{ x }}"), "1");
  EXPECT_EQ(with_roles("{% for a in [] %}{{ a }}{% else %}EMPTY{% endfor %}"), "EMPTY");
  EXPECT_EQ(with_roles("{% for a in ['x','y','z'] if a != 'y' %}{{ loop.index }}{{ a }}{% endfor %}"), "1x2z");
  EXPECT_EQ(with_roles("A\n  {%- if true %}\n  B\n  {%- endif %}\n  {% if true %}\n    C\n  {% endif %}\nD"),
            "A  B    C\nD");
  EXPECT_EQ(with_roles("x\n"), "x");
  EXPECT_EQ(with_roles("[{{ nope }}][{{ nope is defined }}][{{ {}['nope'] is none }}]"), "[][False][False]");
  EXPECT_EQ(with_roles("{{ nope.x }}"), "!t.jinja:1: 'nope' is undefined");
  EXPECT_EQ(with_roles("{{ ms[-1].role }} {{ ms[1:][0].role }} {{ ms[:-1]|length }}"), "c b 2");
  EXPECT_EQ(with_roles("{%- macro f(a, b=2) -%}{{ a }}-{{ b }}{%- endmacro -%}{{ f(1) }} {{ f(1, b=5) }}"),
            "1-2 1-5");
  EXPECT_EQ(with_roles("{% set z %}hi {{ 1 }}{% endset %}[{{ z }}]"), "[hi 1]");
  EXPECT_EQ(with_roles("{{ 7 // 2 }} {{ 7 / 2 }} {{ 7 % 3 }} {{ 2 ** 3 }}"), "3 3.5 1 8");
  EXPECT_EQ(with_roles("{{ '😀'|length }} {{ 'héé'|length }}"), "1 3");
  EXPECT_EQ(
      with_roles("{{ 'abc'.startswith(('x','a')) }} {{ 'xxhix'.strip('x') }} {{ 'aXa'.replace('a','b',1) }}"),
      "True hi bXa");
  EXPECT_EQ(with_roles("{{ {'a':[1,2],'b':{}} | tojson(indent=2) }}"),
            "{\n  \"a\": [\n    1,\n    2\n  ],\n  \"b\": {}\n}");
  EXPECT_EQ(
      with_roles("{% for a in ['x','y'] %}{{ loop.first }}{{ loop.last }}{{ loop.revindex0 }};{% endfor %}"),
      "TrueFalse1;FalseTrue0;");
  EXPECT_EQ(
      with_roles(
          "{{ ms|map(attribute='role')|join(',') }} {{ ms|selectattr('role','equalto','b')|list|length }}"),
      "a,b,c 1");
}

TEST(ChatTemplate, FeaturesAnswerAsJinja2) {
  ASSERT_GT(cases()["features"].size(), 100u);
  for (const Json& c : cases()["features"])
    expect_answer(c[0].get<std::string>(), cases()["feature_context"], c[1]);
}

TEST(ChatTemplate, RandomTemplatesAnswerAsJinja2) {
  SCOPED_TRACE(fmt::format("seed {}", cases()["seed"].get<int64_t>()));
  ASSERT_GE(cases()["random"].size(), 3000u);
  for (const Json& c : cases()["random"])
    expect_answer(c[0].get<std::string>(), cases()["random_context"], c[1]);
}

// Templates in the manner of published ones, over conversations with system texts, tools, calls and reasoning.
TEST(ChatTemplate, ModelStyleTemplatesAnswerAsJinja2) {
  ASSERT_GE(cases()["files"].size(), 8u);
  for (const auto& [file, answers] : cases()["files"].items()) {
    SCOPED_TRACE(file);
    Result<std::string> source = read_file(kDir + file);
    ASSERT_TRUE(source) << source.error().message;
    ASSERT_EQ(answers.size(), cases()["chats"].size());
    for (size_t i = 0; i < answers.size(); ++i) expect_answer(*source, cases()["chats"][i], answers[i]);
  }
}

TEST(ChatTemplate, CompiledTemplateServesManyThreads) {
  Result<std::string> source = read_file(kDir + "think.jinja");
  ASSERT_TRUE(source);
  const Result<ChatTemplate> compiled = ChatTemplate::compile(*source, "think.jinja");
  ASSERT_TRUE(compiled) << compiled.error().message;
  const Json& answers = cases()["files"]["think.jinja"];
  std::vector<int> wrong(4);
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < 4; ++t)
      threads.emplace_back([&, t] {
        for (size_t i = 0; i < answers.size(); ++i) {
          const Result<std::string> text = compiled->render(cases()["chats"][i]);
          wrong[t] += answers[i].is_null() ? bool(text) : !text || *text != answers[i].get<std::string>();
        }
      });
  }
  EXPECT_EQ(wrong, std::vector<int>(4));
}

// -- Normalising messages. --

std::string render_think(const Json& messages) {
  Result<std::string> source = read_file(kDir + "think.jinja");
  const Result<Json> normal = normalise_messages(messages);
  if (!source || !normal) return "!" + (source ? normal.error().message : source.error().message);
  return render(*source, {{"messages", *normal}, {"add_generation_prompt", true}});
}

Json tool_history(const std::string& content_member) {
  return parsed(
      R"([{"role":"user","content":"q"},{"role":"assistant",)" + content_member +
      R"("tool_calls":[{"id":"c1","type":"function","function":{"name":"f","arguments":"{\"x\":1}"}}]},)" +
      R"({"role":"tool","tool_call_id":"c1","content":"42"},{"role":"user","content":"r"}])");
}

TEST(ChatTemplate, Tpl1NullContentAndParts) {
  const std::string from_null = render_think(tool_history(R"("content":null,)"));
  EXPECT_NE(from_null.find(R"({"name": "f", "arguments": {"x": 1}})"), std::string::npos) << from_null;
  EXPECT_EQ(from_null, render_think(tool_history("")));
  EXPECT_EQ(from_null, render_think(tool_history(R"("content":"",)")));
  EXPECT_EQ(from_null, render_think(tool_history(R"("content":[],)")));
  const std::string parts = R"("content":[{"type":"text","text":"a"},{"type":"text","text":"b"}],)";
  EXPECT_EQ(render_think(tool_history(parts)), render_think(tool_history(R"("content":"a\nb",)")));
  const Result<Json> image = normalise_messages(
      parsed(R"([{"role":"user","content":"x"},{"role":"user","content":[{"type":"text","text":"a"},
                                 {"type":"image_url","image_url":{"url":"u"}}]}])"));
  ASSERT_FALSE(image);
  EXPECT_EQ(image.error().code, Error::invalid_argument);
  EXPECT_EQ(image.error().param, "messages[1].content[1].type");
  EXPECT_NE(image.error().message.find("image_url"), std::string::npos);
}

TEST(ChatTemplate, NormaliseNamesThePlaceOfEveryFault) {
  const std::pair<const char*, const char*> faults[] = {
      {R"({})", "messages"},
      {R"([1])", "messages[0]"},
      {R"([{"content":"x"}])", "messages[0].role"},
      {R"([{"role":"user","content":7}])", "messages[0].content"},
      {R"([{"role":"user","content":[7]}])", "messages[0].content[0]"},
      {R"([{"role":"user","content":[{"text":"x"}]}])", "messages[0].content[0].type"},
      {R"([{"role":"user","content":[{"type":"text"}]}])", "messages[0].content[0].text"},
      {R"([{"role":"a","tool_calls":{}}])", "messages[0].tool_calls"},
      {R"([{"role":"a","tool_calls":[1]}])", "messages[0].tool_calls[0]"},
      {R"([{"role":"a","tool_calls":[{"function":1}]}])", "messages[0].tool_calls[0].function"},
  };
  for (const auto& [text, place] : faults) {
    const Result<Json> normal = normalise_messages(parsed(text));
    ASSERT_FALSE(normal) << text;
    EXPECT_EQ(normal.error().param, place);
    EXPECT_EQ(normal.error().message.rfind(place, 0), 0u) << normal.error().message;
  }
}

TEST(ChatTemplate, NormaliseKeepsWhatItDoesNotKnow) {
  const Result<Json> normal = normalise_messages(parsed(
      R"([{"role":"developer","content":"d","name":"n","z":[1]},
          {"role":"x","tool_calls":[{"function":{"name":"f","arguments":"not json"}},{"function":{"name":"g","arguments":""}}]}])"));
  ASSERT_TRUE(normal) << normal.error().message;
  EXPECT_EQ(
      dump_json(*normal),
      R"([{"role":"developer","content":"d","name":"n","z":[1]},{"role":"x","tool_calls":[{"function":{"name":"f",)"
      R"("arguments":"not json"}},{"function":{"name":"g","arguments":{}}}],"content":""}])");
}

// -- Errors. --

TEST(ChatTemplate, Tpl4RaiseExceptionIsTheCallersFault) {
  const std::string source =
      "{% for m in messages %}\n{% if loop.previtem is defined and loop.previtem.role == m.role %}\n"
      "{{ raise_exception('roles must alternate') }}\n{% endif %}\n{{ m.content }}{% endfor %}";
  const Result<ChatTemplate> compiled = ChatTemplate::compile(source, "chat_template");
  ASSERT_TRUE(compiled);
  const Json twice = parsed(R"({"messages":[{"role":"user","content":"1"},{"role":"user","content":"2"}]})");
  const Result<std::string> refused = compiled->render(twice);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Error::invalid_argument);
  EXPECT_EQ(refused.error().message, "chat_template:3: roles must alternate");
  const Json turns =
      parsed(R"({"messages":[{"role":"user","content":"1"},{"role":"assistant","content":"2"}]})");
  const Result<std::string> answer = compiled->render(turns);
  ASSERT_TRUE(answer) << answer.error().message;
  EXPECT_EQ(*answer, "12");
}

TEST(ChatTemplate, SyntaxErrorsNameFileAndLine) {
  const std::pair<const char*, const char*> broken[] = {
      {"a\n\n{% if x %}", "f.jinja:3: the template ends where 'endif' is missing"},
      {"a\n{{ 1 + }}", "f.jinja:2: unexpected '}}'"},
      {"{% nosuch %}", "f.jinja:1: unknown tag 'nosuch'"},
      {"\n{{ x|nosuch }}", "f.jinja:2: there is no filter named 'nosuch'"},
      {"\n\n\n{{ 'x }}", "f.jinja:4: a string is not closed"},
      {"{% include 'x' %}", "f.jinja:1: the tag 'include' is not supported in chat templates"},
      {"\xff", "f.jinja:1: the template is not UTF-8"},
  };
  for (const auto& [source, message] : broken) {
    const Result<ChatTemplate> compiled = ChatTemplate::compile(source, "f.jinja");
    ASSERT_FALSE(compiled) << source;
    EXPECT_EQ(compiled.error().message, message);
  }
}

TEST(ChatTemplate, RuntimeErrorsNameTheLine) {
  EXPECT_EQ(with_roles("a\n{{ 1\n + nope }}"), "!t.jinja:3: 'nope' is undefined");
  EXPECT_EQ(with_roles("{% macro f() %}\n\n{{ 1 / 0 }}{% endmacro %}\n{{ f() }}"),
            "!t.jinja:3: division by zero");
  EXPECT_EQ(with_roles("\n{{ ms[0].role\n.append(1) }}").substr(0, 10), "!t.jinja:3");
}

// What the subset lacks is refused; it never prints something else.
TEST(ChatTemplate, UnsupportedIsAnError) {
  for (const char* source :
       {"{{ 9223372036854775807 * 4 }}", "{{ (-8) ** 0.5 }}", "{{ ms.items }}{{ {}.items }}", "{{ range(3) }}",
        "{{ ms|map('upper') }}", "{{ 'x'.encode() }}", "{{ 'İ'.lower() }}", "{{ ms|groupby('role') }}",
        "{{ lipsum() }}", "{{ 'ﬁ'|upper }}", "{{ self }}"}) {
    EXPECT_EQ(with_roles(source)[0], '!') << source;
  }
}

// -- The sandbox. --

TEST(ChatTemplate, HostileTemplatesEndWithAnError) {
  const std::string nest(5000, '(');
  std::string sums = "1", nots, dots = "x", ifs;
  for (int i = 0; i < 5000; ++i) sums += "+1", nots += "not ", dots += ".a", ifs += "{% if 1 %}";
  const std::string deep =
      "{% set ns = namespace(a=[]) %}{% for i in range(5000) %}{% set ns.a = [ns.a] %}{% endfor %}";
  const std::string wide =
      "{% set ns = namespace(a=[], b=[]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}"
      "{% set ns.b = [ns.b, ns.b] %}{% endfor %}";
  for (const std::string& source :
       {"{{ " + nest + "1 }}",
        "{{ " + sums + " }}",
        "{{ " + nots + "1 }}",
        "{{ " + dots + " }}",
        ifs,
        std::string("{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"),
        std::string("{{ range(100001) }}"),
        std::string("{{ 'x' * 1000000000 }}"),
        std::string("{{ [1] * 1000000000 }}"),
        std::string("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"),
        std::string("{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s "
                    "%}{% endfor %}"),
        std::string("{% for i in range(100000) %}{{ 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx' * 100 }}{% endfor %}"),
        std::string("{% for i in [[]] recursive %}{{ loop([i]) }}{% endfor %}"),
        deep + "{{ ns.a }}",
        deep + "{{ ns.a|tojson }}",
        wide + "{{ ns.a == ns.b }}",
        wide + "{{ ns.a }}",
        wide + "{{ ns.a < ns.b }}",
        std::string("{{ '%1000000000d' % 1 }}"),
        std::string("{{ 'x'.center(1000000000) }}"),
        std::string("{% set ns = namespace() %}{% set ns.me = ns %}{{ ns }}")}) {
    SCOPED_TRACE(source.substr(0, 100));
    EXPECT_EQ(with_roles(source)[0], '!');
  }
}

TEST(ChatTemplate, TextOfMessagesIsNeverTemplate) {
  const Json context = parsed(R"({"m":"{{ 1 + 1 }}{% raise %}","ms":[]})");
  EXPECT_EQ(render("{{ m }}", context), "{{ 1 + 1 }}{% raise %}");
}

// A prompt that a loop grows piece by piece costs linear memory.
TEST(ChatTemplate, LongConversationsFit) {
  Json context = {{"messages", Json::array()}};
  for (int i = 0; i < 4000; ++i)
    context["messages"].push_back({{"role", "user"}, {"content", std::string(1000, 'x')}});
  const std::string source =
      "{% set ns = namespace(s='') %}{% for m in messages %}{% set ns.s = ns.s ~ m.role ~ ': ' ~ m.content %}"
      "{% endfor %}{{ ns.s|length }}";
  EXPECT_EQ(render(source, context), std::to_string(4000 * 1006));
}

// A template that writes the first token writes it once; such a prompt is tokenised without adding another.
TEST(ChatTemplate, Tpl6OneBeginOfSequence) {
  Result<std::string> source = read_file(kDir + "headers.jinja");
  ASSERT_TRUE(source);
  Json context = cases()["chats"][0];
  context["bos_token"] = "<|first|>";
  const std::string prompt = render(*source, context);
  EXPECT_EQ(prompt.find("<|first|>"), 0u);
  EXPECT_EQ(prompt.rfind("<|first|>"), 0u);
}

// The templates of the models that are on this machine, when there are any.
TEST(ChatTemplate, ModelsOnThisMachineCompileAndRender) {
  int found = 0;
  std::error_code none;
  for (const auto& dir : std::filesystem::directory_iterator(EKV_MODELS, none)) {
    const Result<std::string> text = read_file(dir.path() / "tokenizer_config.json");
    if (!text) continue;
    const Result<Json> config = parse_json(*text);
    ASSERT_TRUE(config) << dir.path();
    const Json& source = member(*config, "chat_template");
    if (!source.is_string()) continue;
    const Result<ChatTemplate> compiled =
        ChatTemplate::compile(source.get<std::string>(), dir.path().filename());
    ASSERT_TRUE(compiled) << compiled.error().message;
    const Result<std::string> prompt = compiled->render(cases()["chats"][0]);
    ASSERT_TRUE(prompt) << prompt.error().message;
    EXPECT_NE(prompt->find("Hi"), std::string::npos);
    ++found;
  }
  EXPECT_GT(found, 0) << "no model under " << EKV_MODELS << ": run scripts/setup.sh";
}

}  // namespace
}  // namespace ekv
