#pragma once
// answer.h -- one generating request while it runs: engine events in, reply or chunks out. Used by the thread
// of its connection; ends its sequences when it is destroyed.

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "server/choice_text.h"
#include "server/disconnect_watcher.h"
#include "server/engine_loop.h"
#include "server/openai_reply.h"

namespace ekv {

struct AnswerPrompt {
  std::string text;             // as given; empty: made from the tokens when it is needed
  std::vector<TokenId> tokens;  // as the engine got them
};

class Answer {
 public:
  Answer(const Tokenizer& tokenizer, const ApiRequest& request, std::vector<AnswerPrompt> prompts,
         std::string id, int64_t created_s, std::shared_ptr<Generation> generation);
  ~Answer();
  Answer(const Answer&) = delete;
  Answer& operator=(const Answer&) = delete;

  // Cancels everything as soon as the peer of `socket` has gone.
  void watch(DisconnectWatcher& watcher, int socket);

  Result<std::string> whole_reply();  // blocks until all choices are complete
  // Blocks until there is something to send and puts whole events into `out`. False: that was the last.
  Result<bool> next_events(std::string& out);

 private:
  Status advance();
  Status take(const ChoiceEvent& arrived);
  void stream_choice(int index);
  PromptReport* prompt_report(int index);
  void fill_report(int index, const SeqEvent& first);
  Usage usage() const;
  Usage usage_so_far() const;

  const Tokenizer& tokenizer_;
  ReplyOptions options_;
  int per_prompt_;
  std::vector<AnswerPrompt> prompts_;
  ReplyWriter writer_;
  std::shared_ptr<Generation> generation_;
  std::vector<ChoiceText> texts_;      // [choice]
  std::vector<TextDelta> wholes_;      // [choice] plain replies: everything so far
  std::vector<PromptReport> reports_;  // [choice]
  std::vector<bool> opened_;           // [choice] the first chunk, which carries the report, has been written
  std::vector<ChoiceEvent> events_;
  std::string out_;  // streams: events not yet handed over
  int num_done_ = 0;
  DisconnectWatcher* watcher_ = nullptr;
  uint64_t watch_ = 0;
};

}  // namespace ekv
